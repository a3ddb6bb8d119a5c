//! Continues texts with a trained network: a GPT that one of the training programs has written to a
//! checkpoint or with `--export`.
//!
//! ```text
//! sync_sgd --model gpt --steps 2000 --export gpt.h5           trains one on Shakespeare
//! generate gpt.h5                                             continues a line break, streamed to stdout
//! mpiexec -n 4 generate gpt.h5 --prompt 'ROMEO:' --prompt 'JULIET:' --samples 8   16 texts, four a rank
//! ```
//!
//! A text depends on the seed and its number, not on the ranks.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::app::{self, CommonOptions, FileOption, Program};
use phalanx::comm::{World, ranks_on_nodes};
use phalanx::dataset::Tokeniser;
use phalanx::device::Cpu;
use phalanx::infer::{Sampling, TextGenerator, TrainedNetwork};
use phalanx::train::Given;
use phalanx::{Error, Result};

/// The beginning of texts for which no other is given.
const DEFAULT_PROMPT: &str = "\n";

/// Continue texts with a trained network; the ranks share the texts.
#[derive(Parser)]
#[command(name = "generate", version, args_override_self = true)]
struct Arguments {
    #[command(flatten)]
    given: Given,

    /// A checkpoint, or a file of --export
    network: PathBuf,

    /// Beginning of texts; give the option again for more beginnings. For a network of tokens that are
    /// numbers, numbers with spaces between them [default: a line break]
    #[arg(long, value_name = "TEXT")]
    prompt: Vec<String>,

    /// Number of texts for each prompt
    #[arg(long, value_name = "N", default_value_t = 1)]
    samples: usize,

    /// Number of tokens of each text, after the prompt
    #[arg(long, value_name = "N", default_value_t = 500)]
    length: usize,

    /// Divisor of the logits: below 1, likely tokens become likelier; 0 takes the likeliest
    #[arg(long, value_name = "T", default_value_t = 0.8, allow_negative_numbers = true)]
    temperature: f32,

    /// Choose among this many of the likeliest tokens [default: all]
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,

    /// Seed of the random draws
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,

    #[command(flatten)]
    common: CommonOptions,
}

/// The network, and the prompts.
struct Prepared<'a> {
    generator: TextGenerator<'a, Cpu>,
    tokeniser: Tokeniser,
    prompts: Vec<Prompt>,
}

/// The beginning of texts.
struct Prompt {
    text: String,
    tokens: Vec<u16>,
}

/// Checks the options, and prepares the network and the prompts. Not collective.
fn prepare<'a>(device: &'a Cpu, trained: &TrainedNetwork, arguments: &Arguments) -> Result<Prepared<'a>> {
    let Arguments { given, network, prompt, samples, temperature, top_k, seed, .. } = arguments;
    if *samples == 0 {
        return Err(Error::input("--samples", "it is 0, but must be at least 1"));
    }
    if !(0.0..=1e3).contains(temperature) {
        return Err(Error::input(
            "--temperature",
            format!("it is {temperature}, but must be from 0 to 1000"),
        ));
    }
    if *top_k == Some(0) {
        return Err(Error::input("--top-k", "it is 0, but must be at least 1"));
    }
    let no_draws = (*temperature == 0.0).then_some("with --temperature 0 the likeliest token follows");
    given.refuse("top-k", no_draws)?;
    given.refuse("seed", no_draws)?;
    let Some(tokeniser) = trained.tokeniser() else {
        let why = "the network was not trained with a text, so its outputs stand for no characters";
        return Err(Error::input(format!("reading {}", network.display()), why));
    };
    let refused = |why: String| match prompt.as_slice() {
        [] => Error::input("--prompt", format!("its default, a line break, cannot begin a text: {why}")),
        _ => Error::input("--prompt", why),
    };
    let prompt_of = |text: String| match tokeniser.encode(text.as_bytes()).map_err(refused)? {
        tokens if tokens.is_empty() => {
            Err(Error::input("--prompt", "it is empty, and a text continues at least one token"))
        }
        tokens => Ok(Prompt { text, tokens }),
    };
    let texts = if prompt.is_empty() { vec![DEFAULT_PROMPT.to_owned()] } else { prompt.clone() };
    let prompts = texts.into_iter().map(prompt_of).collect::<Result<_>>()?;
    let sampling = Sampling { temperature: *temperature, top_k: *top_k, seed: *seed };
    let generator = TextGenerator::new(device, trained, sampling)?;
    Ok(Prepared { generator, tokeniser, prompts })
}

/// Continues text `number`, calls `show` with the prompt and with what each token adds, until it wants no
/// more, and returns the text. Not collective.
fn continue_text(
    prepared: &mut Prepared<'_>,
    number: usize,
    arguments: &Arguments,
    show: &mut dyn FnMut(&[u8]) -> Result<ControlFlow<()>>,
) -> Result<Vec<u8>> {
    let Prepared { generator, tokeniser, prompts } = prepared;
    let Prompt { text: prompt, tokens } = &prompts[number / arguments.samples];
    let mut text = prompt.as_bytes().to_vec();
    if show(&text)?.is_break() {
        return Ok(text);
    }
    generator.run(number as u64, tokens, arguments.length, &mut |token| {
        let start = text.len();
        tokeniser.decode(token, &mut text);
        show(&text[start..])
    })?;
    Ok(text)
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let (all, device) = (world.communicator(), Cpu::new(1)?);
    let trained = TrainedNetwork::open_on_all(all, &arguments.network)?;
    let mut prepared = all.agree(prepare(&device, &trained, arguments))?;
    let num_texts = arguments.samples.saturating_mul(prepared.prompts.len());
    let began = Instant::now();
    let mut reader = ControlFlow::Continue(());
    // each rank has one text of a round; those of rank 0 are shown as they grow
    for first in (0..num_texts).step_by(world.size()) {
        let numbers = first..num_texts.min(first + world.size());
        let own = numbers.clone().nth(world.rank()).map(|number| {
            continue_text(&mut prepared, number, arguments, &mut |more| {
                if world.is_root() {
                    reader = app::print_bytes(more)?;
                }
                Ok(reader)
            })
        });
        let mut own = all.agree(own.transpose())?;
        for (rank, number) in numbers.enumerate() {
            let own = if rank == world.rank() { own.take() } else { None };
            let text = all.broadcast_bytes(own.unwrap_or_default(), rank)?;
            if world.is_root() {
                let text = if rank == 0 { &[] } else { text.as_slice() };
                let end: &[u8] = if number + 1 < num_texts { b"\n---\n" } else { b"\n" };
                reader = app::print_bytes(&[text, end].concat())?;
            }
        }
        if all.any_rank(reader.is_break())? {
            return Ok(());
        }
    }
    if world.is_root() {
        let num_tokens = num_texts as f64 * arguments.length as f64;
        let rate = num_tokens / began.elapsed().as_secs_f64().max(1e-9);
        let job = ranks_on_nodes(world.size(), world.num_nodes());
        log::info!("{num_tokens} tokens, {rate:.0} tokens/s; {job}");
    }
    Ok(())
}

impl Program for Arguments {
    fn common(&self) -> &CommonOptions {
        &self.common
    }

    fn check_files(&self) -> Result<()> {
        let mut files = self.common.files();
        files.push(FileOption::input("NETWORK", &self.network));
        app::check_files(&files)
    }
}

fn main() -> ExitCode {
    app::main(run)
}
