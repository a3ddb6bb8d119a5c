// NVRTC without a compiler: every program compiles, to an image that is its own source after a byte that
// says "binary", for kernels whose names macros make do not stand in it: the emulated driver finds all that
// it was built with. A source with the text "#error" fails with a log. Options and headers are not looked
// at, nothing is preprocessed.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_set>

#include "abi.h"

namespace {
enum nvrtcResult : int { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6 };

struct Program {
    std::string name, source, log;
    bool compiled = false;
};

std::mutex lock;
std::unordered_set<Program*> live;

bool is_live(Program* program) {
    std::lock_guard<std::mutex> guard(lock);
    return live.count(program) != 0;
}

nvrtcResult size_of_image(Program* program, size_t* bytes) {
    if (!is_live(program) || !program->compiled) return INVALID_PROGRAM;
    *bytes = program->source.size() + 2;
    return SUCCESS;
}

nvrtcResult copy_image(Program* program, char* image) {
    if (!is_live(program) || !program->compiled) return INVALID_PROGRAM;
    *image = 0x7f;
    memcpy(image + 1, program->source.c_str(), program->source.size() + 1);
    return SUCCESS;
}

const int architectures[] = {75, 80, 86, 87, 89, 90, 100, 103, 120};
}  // namespace

API nvrtcResult nvrtcVersion(int* major, int* minor) {
    const char* wanted = getenv("PHALANX_EMULATED_NVRTC");
    *major = wanted ? atoi(wanted) : 12;
    *minor = wanted ? 0 : 9;
    return SUCCESS;
}

API nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
    *count = sizeof architectures / sizeof *architectures;
    return SUCCESS;
}

API nvrtcResult nvrtcGetSupportedArchs(int* result) {
    memcpy(result, architectures, sizeof architectures);
    return SUCCESS;
}

API const char* nvrtcGetErrorString(int result) {
    static const char* const names[] = {
        "NVRTC_SUCCESS", "NVRTC_ERROR_OUT_OF_MEMORY", "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
        "NVRTC_ERROR_INVALID_INPUT", "NVRTC_ERROR_INVALID_PROGRAM", "NVRTC_ERROR_INVALID_OPTION",
        "NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
        "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
        "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION", "NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
        "NVRTC_ERROR_INTERNAL_ERROR"};
    return result >= 0 && result < 12 ? names[result] : "NVRTC_ERROR unknown";
}

API nvrtcResult nvrtcCreateProgram(Program** program, const char* source, const char* name, int,
                                   const char* const*, const char* const*) {
    if (!program || !source) return INVALID_INPUT;
    auto* made = new Program;
    made->source = source;
    made->name = name && *name ? name : "default_program";
    std::lock_guard<std::mutex> guard(lock);
    live.insert(made);
    *program = made;
    return SUCCESS;
}

API nvrtcResult nvrtcDestroyProgram(Program** program) {
    std::lock_guard<std::mutex> guard(lock);
    if (!program || !live.erase(*program)) return INVALID_PROGRAM;
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

API nvrtcResult nvrtcCompileProgram(Program* program, int, const char* const*) {
    if (!is_live(program)) return INVALID_PROGRAM;
    size_t at = program->source.find("#error");
    if (at == std::string::npos) {
        program->compiled = true;
        return SUCCESS;
    }
    size_t line = 1;
    for (size_t i = 0; i < at; ++i) line += program->source[i] == '\n';
    std::string text = program->source.substr(at + 6, program->source.find('\n', at) - at - 6);
    program->log = program->name + "(" + std::to_string(line) + "): error: #error directive:" + text +
                   "\n1 error detected in the compilation of \"" + program->name + "\".\n";
    return COMPILATION;
}

API nvrtcResult nvrtcGetPTXSize(Program* program, size_t* bytes) { return size_of_image(program, bytes); }
API nvrtcResult nvrtcGetPTX(Program* program, char* image) { return copy_image(program, image); }
API nvrtcResult nvrtcGetCUBINSize(Program* program, size_t* bytes) { return size_of_image(program, bytes); }
API nvrtcResult nvrtcGetCUBIN(Program* program, char* image) { return copy_image(program, image); }

API nvrtcResult nvrtcGetProgramLogSize(Program* program, size_t* bytes) {
    if (!is_live(program)) return INVALID_PROGRAM;
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

API nvrtcResult nvrtcGetProgramLog(Program* program, char* log) {
    if (!is_live(program)) return INVALID_PROGRAM;
    memcpy(log, program->log.c_str(), program->log.size() + 1);
    return SUCCESS;
}
