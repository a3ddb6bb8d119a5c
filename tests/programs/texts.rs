//! `generate`: the same texts on any number of ranks, and its answers to what it cannot continue; `predict`
//! with a text.

use std::io::Read as _;
use std::process::{Command, Stdio};

use crate::support::{Done, directory, mpiexec, until};
use serde_json::Value;

fn generate(ranks: usize, arguments: &[&str]) -> Done {
    mpiexec(ranks, env!("CARGO_BIN_EXE_generate")).args(arguments.iter().copied()).without_grace().run()
}

/// Trains a small transformer on the embedded text, with `arguments`, and exports it to `path`.
fn train(path: &str, arguments: &str) -> Value {
    let fixed = "--threads 1 --quiet --model gpt --layers 2 --heads 2 --width 16 --steps 20 --batch-size 16 \
                 --optimizer adamw --learning-rate 0.01 --eval-every 0";
    let job = mpiexec(2, env!("CARGO_BIN_EXE_sync_sgd")).args(fixed.split_whitespace());
    job.args(arguments.split_whitespace()).args(["--export", path]).run().expect(0).result()
}

#[test]
fn texts_are_the_same_on_any_number_of_ranks() {
    let (_directory, folder) = directory();
    let network = format!("{folder}/gpt.h5");
    train(&network, "--context 16");
    let texts = |ranks: usize, more: &[&str]| {
        let fixed = [network.as_str(), "--prompt", "ROMEO:", "--samples", "5", "--length", "40"];
        generate(ranks, &[&fixed, more].concat()).expect(0).stdout
    };
    let first = texts(1, &[]);
    let parts: Vec<&str> = first.strip_suffix('\n').unwrap().split("\n---\n").collect();
    assert_eq!(parts.len(), 5, "{first}");
    for (at, part) in parts.iter().enumerate() {
        assert!(part.starts_with("ROMEO:") && part.chars().count() == 46, "{part:?}");
        assert!(!parts[..at].contains(part), "two texts are {part:?}");
    }
    // in rounds: of several texts each, or of one
    for ranks in [2, 3, 4, 7] {
        assert_eq!(texts(ranks, &[]), first, "on {ranks} ranks");
    }
    // texts of a second prompt follow those of the first, by draws of their own
    let both = texts(2, &["--prompt", "JULIET:"]);
    let others = both.strip_prefix(first.strip_suffix('\n').unwrap()).expect("the texts of the first prompt");
    let parts: Vec<&str> = others.strip_suffix('\n').unwrap().split("\n---\n").skip(1).collect();
    assert!(parts.len() == 5 && parts.iter().all(|part| part.starts_with("JULIET:")), "{both}");
    assert_eq!(texts(3, &["--prompt", "JULIET:"]), both);
    assert_ne!(texts(1, &["--seed", "2"]), first);
    assert_ne!(texts(1, &["--top-k", "2"]), first);
    // the likeliest token does not depend on the draw, so all texts are one
    let greedy = texts(3, &["--temperature", "0"]);
    let parts: Vec<&str> = greedy.strip_suffix('\n').unwrap().split("\n---\n").collect();
    assert!(parts.iter().all(|part| *part == parts[0]), "{greedy}");
    assert_eq!(texts(1, &["--top-k", "1", "--seed", "7"]), greedy);
    // a prompt that is longer than the context
    let long = "First Citizen: speak, speak.\n";
    let said = |ranks| generate(ranks, &[&network, "--prompt", long, "--length", "20"]).expect(0).stdout;
    assert!(said(1).starts_with(long) && said(1).chars().count() == long.len() + 21, "{}", said(1));
    assert_eq!(said(3), said(1));
}

/// `generate ... | head -1` would otherwise compute a text that nobody reads.
#[test]
fn a_reader_that_leaves_ends_the_text() {
    let (_directory, folder) = directory();
    let network = format!("{folder}/gpt.h5");
    train(&network, "--context 16 --steps 1");
    let mut command = Command::new(env!("CARGO_BIN_EXE_generate"));
    let endless = ["--length", "1000000000", "--samples", "2", "--quiet"];
    let mut program = command.arg(&network).args(endless).stdout(Stdio::piped()).spawn().unwrap();
    let mut read = [0; 64];
    program.stdout.take().unwrap().read_exact(&mut read).unwrap();
    until(|| program.try_wait().unwrap().is_some());
    assert!(program.wait().unwrap().success());
}

#[test]
fn what_cannot_be_continued_is_refused() {
    let (_directory, folder) = directory();
    let [text, tokens, digits] = ["text.h5", "tokens.h5", "digits.h5"].map(|name| format!("{folder}/{name}"));
    train(&text, "--context 8 --steps 1");
    train(&tokens, "--steps 1 --data synthetic --synthetic-shape tokens:8 --synthetic-samples 64");
    let digits_run = ["--threads", "1", "--quiet", "--steps", "1", "--export", &digits];
    mpiexec(1, env!("CARGO_BIN_EXE_sync_sgd")).args(digits_run).run().expect(0);
    let both_ways = format!("{folder}/both-ways.h5");
    let network = format!("{folder}/both-ways.kdl");
    std::fs::write(&network, "embedding 8\nattention 2\nlinear 65\n").unwrap();
    let words = "--threads 1 --quiet --data shakespeare --context 8 --steps 1 --network".split(' ');
    let job = mpiexec(1, env!("CARGO_BIN_EXE_sync_sgd")).args(words).args([&network]);
    job.args(["--export", &both_ways]).run().expect(0);
    for ranks in [1, 3] {
        let refused = |arguments: &[&str], why: &str| {
            generate(ranks, arguments).expect(2).says_once(why);
        };
        refused(&[&format!("{folder}/none.h5")], "No such file or directory");
        refused(
            &[&text, "--prompt", "caffè"],
            "--prompt: 'è' is not in the text with which the network was trained",
        );
        refused(&[&text, "--prompt", ""], "--prompt: it is empty, and a text continues at least one token");
        refused(&[&text, "--temperature", "-1"], "--temperature: it is -1, but must be from 0 to 1000");
        refused(&[&text, "--top-k", "0"], "--top-k: it is 0, but must be at least 1");
        refused(
            &[&text, "--top-k", "3", "--temperature", "0"],
            "--top-k: it has no effect in this run: with --temperature 0 the likeliest token follows",
        );
        refused(&[&text, "--seed", "3", "--temperature", "0"], "--seed: it has no effect in this run");
        refused(&[&text, "--samples", "0"], "--samples: it is 0, but must be at least 1");
        refused(&[&both_ways], "its attention is not causal");
        for network in [&tokens, &digits] {
            refused(&[network], "the network was not trained with a text");
        }
    }
}

#[test]
fn a_text_is_predicted_token_by_token() {
    let (_directory, folder) = directory();
    let [network, other] = ["gpt.h5", "other.txt"].map(|name| format!("{folder}/{name}"));
    let run = train(&network, "--context 16");
    let predict = |ranks: usize, arguments: &[&str]| {
        let job = mpiexec(ranks, env!("CARGO_BIN_EXE_predict")).args([&network, "--quiet", "--threads", "1"]);
        job.args(arguments.iter().copied()).without_grace().run()
    };
    let mut lines = Vec::new();
    for ranks in [1, 3] {
        let output = format!("{folder}/{ranks}.h5");
        let scored = predict(ranks, &["--part", "test", "--output", &output]).expect(0).result();
        let [loss, expected] = [&scored["loss"], &run["test_loss"]].map(|loss| loss.as_f64().unwrap());
        assert!((loss / expected - 1.0).abs() < 1e-6, "{loss} is not {expected}");
        assert_eq!(scored["accuracy"], run["accuracy"]);
        lines.push((scored["loss"].clone(), std::fs::read(&output).unwrap()));
    }
    assert!(lines[0] == lines[1], "a file differs on 3 ranks");
    // another text has the tokens of the first, though not in the same places
    std::fs::write(&other, "zebras, and much ado about nothing at all").unwrap();
    let scored = predict(2, &["--data", &other]).expect(0).result();
    assert_eq!(scored["samples"], 2);
    let classes = scored["classes"].as_array().unwrap();
    // z is the last of the 65 characters, a and the space come often
    assert!(classes.iter().all(|class| class["class"].as_u64().unwrap() < 65), "{scored}");
    assert!(classes.iter().any(|class| class["class"] == 1 && class["num"].as_u64() > Some(4)), "{scored}");
    std::fs::write(&other, "zebras, and much ado about nothing at all: 100 %").unwrap();
    predict(3, &["--data", &other])
        .expect(2)
        .says_once("'1' is not in the text with which the network was trained");
    std::fs::write(&other, "zebras").unwrap();
    predict(1, &["--data", &other])
        .expect(2)
        .says_once("it has 6 tokens, but a sample needs 17 (a context of 16 and the one after)");
}

#[test]
fn tokens_that_are_numbers_are_continued_as_numbers() {
    let (_directory, folder) = directory();
    let [network, tokens] = ["numbers.h5", "tokens.bin"].map(|name| format!("{folder}/{name}"));
    let numbers: Vec<u8> = (0..400_u16).flat_map(|number| (number % 12).to_le_bytes()).collect();
    std::fs::write(&tokens, numbers).unwrap();
    train(&network, &format!("--context 8 --data {tokens}"));
    let said = generate(3, &[&network, "--prompt", "3 4 5", "--length", "6"]).expect(0).stdout;
    let words: Vec<u16> = said.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!(words.len() == 9 && words[..3] == [3, 4, 5] && words.iter().all(|word| *word < 12), "{said}");
    let refused = |prompt: &[&str], what: &str| {
        generate(2, &[&[network.as_str()], prompt].concat()).expect(2).says_once(what);
    };
    refused(&["--prompt", "3 12"], "--prompt: \"12\" is not a token; tokens are numbers from 0 to 11");
    refused(&["--prompt", "-"], "--prompt: \"-\" is not a token");
    refused(
        &[],
        "--prompt: its default, a line break, cannot begin a text: give tokens as numbers with spaces",
    );
    let words = format!("--model gpt --context 8 --data {tokens} --tokens bytes");
    let job = mpiexec(2, env!("CARGO_BIN_EXE_sync_sgd")).args(words.split_whitespace()).without_grace();
    job.run().expect(2).says_once("--tokens: it has no effect in this run: it is for texts of characters");
}

/// Trains on `data` with `arguments` and returns the finished job.
fn train_on(ranks: usize, data: &str, arguments: &str) -> Done {
    let fixed = "--threads 1 --quiet --model gpt --layers 1 --heads 1 --width 8 --batch-size 8 \
                 --eval-every 0";
    let job = mpiexec(ranks, env!("CARGO_BIN_EXE_sync_sgd")).args(fixed.split_whitespace());
    job.args(["--data", data]).args(arguments.split_whitespace()).without_grace().run()
}

#[test]
fn tokens_are_the_same_in_every_kind_of_file() {
    let (_directory, folder) = directory();
    let tokens: Vec<u16> = (0..400).map(|at| (5 * at + at / 23) % 23).collect();
    let write = |name: &str, shape: &[usize], tokens: &[u16]| {
        let file = hdf5::File::create(format!("{folder}/{name}")).unwrap();
        file.new_dataset::<u16>().shape(shape).create("tokens").unwrap().write_raw(tokens).unwrap();
    };
    std::fs::create_dir(format!("{folder}/parts")).unwrap();
    std::fs::write(format!("{folder}/tokens.bin"), bytemuck::cast_slice::<u16, u8>(&tokens)).unwrap();
    write("tokens.h5", &[400], &tokens);
    write("parts/1.h5", &[150], &tokens[..150]);
    write("parts/2.h5", &[250], &tokens[150..]);
    let digest = |ranks, data: &str, more: &str| {
        train_on(ranks, &format!("{folder}/{data}"), &format!("--steps 6 {more}")).expect(0).digest()
    };
    let of_numbers = digest(1, "tokens.bin", "--context 9");
    for data in ["tokens.h5", "parts", "parts/[12].h5"] {
        assert_eq!(digest(2, data, "--context 9"), of_numbers, "{data}");
    }
    assert_ne!(digest(1, "tokens.h5", "--context 8"), of_numbers);

    // a row has a token more than there are positions
    write("rows.h5", &[40, 10], &tokens);
    assert_eq!(digest(3, "rows.h5", ""), digest(1, "rows.h5", ""));
    for option in ["--context 9", "--stride 9"] {
        let refused = train_on(2, &format!("{folder}/rows.h5"), option).expect(2);
        refused.says_once("it has no effect in this run: each row of ");
    }
    // what would be read at the next start is no place for results
    let parts = format!("{folder}/parts");
    for place in [format!("--export {parts}/out.h5"), format!("--checkpoint-dir {parts}")] {
        train_on(2, &parts, &format!("--context 9 --steps 1 {place}")).expect(2).says_once("--data");
    }
    train_on(1, &parts, &format!("--context 9 --steps 1 --export {parts}/out.weights")).expect(0);
    write("parts/3.h5", &[40, 10], &tokens);
    let refused = train_on(2, &format!("{folder}/parts"), "--context 9").expect(2);
    refused.says_once("parts/3.h5: it has rows of 10 tokens, but ");
}

#[test]
fn a_text_is_read_by_characters_or_bytes() {
    let (_directory, folder) = directory();
    let [text, other, weights] =
        ["text.txt", "other.txt", "weights.h5"].map(|name| format!("{folder}/{name}"));
    std::fs::write(&text, "Zwölf Boxkämpfer jagen Eva quer über den Deich. ".repeat(20)).unwrap();
    std::fs::write(&other, "Zwölf Boxkämpfer jagen Eva quer über den Teich. ".repeat(20)).unwrap();
    let vocabulary = |arguments: &str| {
        let line = train_on(2, &text, &format!("--context 8 --steps 2 {arguments}")).expect(0).result();
        // a row of 8 for each token and position; a layer of one head without a bias; three norms
        let of_tokens = line["parameters"].as_u64().unwrap() - 8 * 8 - 12 * 64 - 3 * 8;
        assert!(of_tokens.is_multiple_of(8), "{line}");
        of_tokens / 8
    };
    // three of the characters have two bytes
    assert_eq!(vocabulary(&format!("--no-bias --export {weights}")), 31);
    assert_eq!(vocabulary("--no-bias --tokens bytes"), 256);

    // rows of the embedding stand for characters
    let init = format!("--context 8 --steps 1 --no-bias --init {weights}");
    train_on(1, &text, &init).expect(0);
    train_on(3, &other, &init).expect(2).says_once("its tokens are not those of --data: they lack 'T'");
    train_on(1, &text, &format!("{init} --tokens bytes"))
        .expect(2)
        .says_once("they are 31 characters, not bytes; train on a text with the same characters");
}

#[test]
fn without_shuffling_samples_come_in_the_order_of_the_file() {
    let (_directory, folder) = directory();
    let [all, first] = ["all.bin", "first.bin"].map(|name| format!("{folder}/{name}"));
    let tokens: Vec<u16> = (0..600).map(|at| (7 * at + at / 31) % 31).collect();
    std::fs::write(&all, bytemuck::cast_slice::<u16, u8>(&tokens)).unwrap();
    std::fs::write(&first, bytemuck::cast_slice::<u16, u8>(&tokens[..16 * 8 + 1])).unwrap();
    let digest = |ranks, data: &str, shuffle: &str| {
        let words = format!("--context 8 --steps 2 --test-fraction 0 --shuffle {shuffle}");
        train_on(ranks, data, &words).expect(0).digest()
    };
    // the two batches of the short file are the first two of the long one
    let in_order = digest(1, &all, "off");
    assert_eq!(digest(3, &first, "off"), in_order);
    assert_ne!(digest(1, &all, "full"), in_order);
}
