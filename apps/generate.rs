//! Continues texts with a trained network: a GPT that one of the training programs has written to a
//! checkpoint or with `--export`.
//!
//! ```text
//! sync_sgd --model gpt --steps 2000 --export gpt.h5           trains one on Shakespeare
//! generate gpt.h5                                             continues a line break, streamed to stdout
//! mpiexec -n 4 generate gpt.h5 --prompt 'ROMEO:' --samples 8  two texts on each rank, printed in order
//! ```
//!
//! A text depends on the seed and its number, not on the ranks.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use phalanx::app::{self, CommonOptions, FileOption, Program};
use phalanx::comm::{World, shard};
use phalanx::dataset::Tokeniser;
use phalanx::device::Cpu;
use phalanx::infer::{Sampling, TextGenerator, TrainedNetwork};
use phalanx::{Error, Result};

/// Continue texts with a trained network; the ranks share the texts.
#[derive(Parser)]
#[command(name = "generate", version, args_override_self = true)]
struct Arguments {
    /// A checkpoint, or a file of --export
    network: PathBuf,

    /// Beginning of each text; the numbers of tokens where these stand for no text [default: a line break]
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    prompt: String,

    /// Number of texts
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

/// Prepares the network and the prompt. Not collective.
fn prepare<'a>(
    device: &'a Cpu,
    trained: &TrainedNetwork,
    arguments: &Arguments,
) -> Result<(TextGenerator<'a, Cpu>, Tokeniser, Vec<u16>)> {
    let Arguments { network, prompt, temperature, top_k, seed, .. } = arguments;
    if !(0.0..=1e3).contains(temperature) {
        return Err(Error::input(
            "--temperature",
            format!("it is {temperature}, but must be from 0 to 1000"),
        ));
    }
    if *top_k == Some(0) {
        return Err(Error::input("--top-k", "it is 0, but must be at least 1"));
    }
    if top_k.is_some() && *temperature == 0.0 {
        return Err(Error::input("--top-k", "it has no effect with --temperature 0, the likeliest token"));
    }
    let Some(tokeniser) = trained.tokeniser() else {
        let why = "the network was not trained with a text, so its outputs stand for no characters";
        return Err(Error::input(format!("reading {}", network.display()), why));
    };
    let tokens = tokeniser.encode(prompt.as_bytes()).map_err(|why| Error::input("--prompt", why))?;
    if tokens.is_empty() {
        return Err(Error::input("--prompt", "it is empty, and a text continues at least one token"));
    }
    let sampling = Sampling { temperature: *temperature, top_k: *top_k, seed: *seed };
    Ok((TextGenerator::new(device, trained, sampling)?, tokeniser, tokens))
}

fn run(world: &World, arguments: &Arguments) -> Result<()> {
    let (all, device) = (world.communicator(), Cpu::new(1)?);
    let trained = TrainedNetwork::open_on_all(all, &arguments.network)?;
    let (mut generator, tokeniser, prompt) = all.agree(prepare(&device, &trained, arguments))?;
    let own = shard(arguments.samples, world.rank(), world.size());
    let began = Instant::now();
    // the first text is shown as it grows
    let is_shown = |text: usize| text == 0;
    let texts = own.map(|number| -> Result<Vec<u8>> {
        let mut text = arguments.prompt.clone().into_bytes();
        if is_shown(number) {
            app::print_bytes(&text)?;
        }
        let length = arguments.length;
        generator.run(number as u64, &prompt, length, &mut |token| {
            let start = text.len();
            tokeniser.decode(token, &mut text);
            if is_shown(number) { app::print_bytes(&text[start..]) } else { Ok(()) }
        })?;
        Ok(text)
    });
    let texts: Vec<Vec<u8>> = all.agree(texts.collect())?;
    let mut texts = texts.into_iter();
    for rank in 0..world.size() {
        for number in shard(arguments.samples, rank, world.size()) {
            let own = if rank == world.rank() { texts.next() } else { None };
            let text = all.broadcast_bytes(own.unwrap_or_default(), rank)?;
            if world.is_root() && !is_shown(number) {
                app::print_bytes(&text)?;
            }
            if world.is_root() {
                app::print_line(if number + 1 < arguments.samples { "\n---" } else { "" })?;
            }
        }
    }
    if world.is_root() {
        let num_tokens = (arguments.samples * arguments.length) as f64;
        let rate = num_tokens / began.elapsed().as_secs_f64().max(1e-9);
        log::info!("{num_tokens} tokens, {rate:.0} tokens/s on {} ranks", world.size());
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
