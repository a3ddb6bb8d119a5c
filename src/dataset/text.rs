//! Texts as sequences of tokens, and the embedded one.

use std::io::Read;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

use xxhash_rust::xxh3::Xxh3;

use super::files::{LARGEST_FILE, open_file};
use super::hdf5::{StoredTokens, read_tokens, token_files};
use super::tokeniser::Tokeniser;
use super::{Data, Dataset, Targets};
use crate::nn::Features;
use crate::{Error, Result};

static SHAKESPEARE: &[u8] = include_bytes!("../../data/shakespeare.txt.gz");

/// The most tokens that a vocabulary has: they have 16 bits.
const MOST_TOKENS: usize = 1 << 16;

/// The tokens of a text.
#[derive(Debug, Clone)]
pub enum TextTokens {
    /// One for each character that is in the text.
    Characters,
    /// One for each byte.
    Bytes,
    /// Those of a tokeniser, which may lack some of the text.
    Of(Tokeniser),
}

/// The cut of a text into samples.
#[derive(Debug, Clone)]
pub struct TextSettings {
    /// The tokens.
    pub tokens: TextTokens,
    /// The number of tokens of a sample.
    pub context: usize,
    /// The number of tokens from the start of a training sample to that of the next.
    pub stride: usize,
    /// The share of the tokens, at the end, to test with.
    pub test_fraction: f64,
}

/// Consecutive tokens of a text, cut into samples of one length. The target of a position is the token
/// after it.
pub struct TokenText {
    source: String,
    tokeniser: Tokeniser,
    tokens: Rc<Vec<u16>>,
    range: Range<usize>,
    context: usize,
    stride: usize,
}

/// Returns true for a source of characters: the embedded text and `.txt` files. Not collective.
pub fn has_characters(source: &str) -> bool {
    source == "shakespeare" || has_extension(Path::new(source), &["txt"])
}

/// Returns true for the names of files with text or with tokens that are no HDF5 files.
pub fn is_text_name(name: &str) -> bool {
    has_extension(Path::new(name), &["txt", "bin"])
}

fn has_extension(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|found| extensions.iter().any(|extension| found == *extension))
}

/// Opens the embedded text, of Shakespeare. Not collective.
///
/// # Errors
/// The settings leave no samples.
pub fn open_shakespeare(settings: TextSettings) -> Result<Data> {
    let mut text = Vec::new();
    let unpacked = flate2::read::GzDecoder::new(SHAKESPEARE).read_to_end(&mut text);
    unpacked.map_err(|error| Error::failed("unpacking the embedded text", error.to_string()))?;
    of_text("the embedded text", &text, settings)
}

/// Opens a `.txt` file, a `.bin` file of tokens as little-endian numbers of 16 bits, or HDF5 files, by name,
/// directory or pattern, whose datasets `tokens` are one sequence, or have a row for each sample: a row of N
/// tokens has N − 1 positions, whose targets are the tokens after them. Rows leave the context and the stride
/// of the settings unused. Returns `None` for other files. Not collective.
///
/// # Errors
/// A file cannot be read, is no text of the kind that the settings say, or is too short.
pub fn open_text(source: &str, settings: TextSettings) -> Result<Option<Data>> {
    let path = Path::new(source);
    let fail = |why: String| Error::input(format!("reading {source}"), why);
    let files = token_files(source);
    if !files.is_empty() {
        let StoredTokens { tokens, columns } = read_tokens(&files)?;
        let tokeniser = of_numbers(&tokens, &settings).map_err(fail)?;
        return split(source, tokeniser, tokens, columns, &settings).map(Some);
    }
    if !path.is_file() || !is_text_name(source) {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    let file = open_file(path).map_err(fail)?;
    file.take(LARGEST_FILE as u64 + 1).read_to_end(&mut bytes).map_err(|error| fail(error.to_string()))?;
    if bytes.len() > LARGEST_FILE {
        return Err(fail(format!("it has more than {LARGEST_FILE} bytes, the limit of a text")));
    }
    if has_extension(path, &["txt"]) {
        return of_text(source, &bytes, settings).map(Some);
    }
    if bytes.len() % 2 == 1 {
        return Err(fail(format!("it has {} bytes, an odd number, but tokens have two each", bytes.len())));
    }
    let tokens: Vec<u16> = bytes.as_chunks::<2>().0.iter().map(|two| u16::from_le_bytes(*two)).collect();
    let tokeniser = of_numbers(&tokens, &settings).map_err(fail)?;
    split(source, tokeniser, tokens, None, &settings).map(Some)
}

/// Returns the tokeniser of a file of numbers, or says why they are not those of the known one.
fn of_numbers(tokens: &[u16], settings: &TextSettings) -> std::result::Result<Tokeniser, String> {
    let largest = tokens.iter().max().copied().unwrap_or_default();
    let num_tokens = usize::from(largest) + 1;
    match &settings.tokens {
        TextTokens::Of(known @ Tokeniser::Numbers(num)) if num_tokens <= *num => Ok(known.clone()),
        TextTokens::Of(Tokeniser::Numbers(num)) => {
            let last = num.saturating_sub(1);
            Err(format!("it has the token {largest}, but those of the network are 0 to {last}"))
        }
        TextTokens::Of(_) => Err("it has tokens as numbers, but the network was trained on a text".into()),
        TextTokens::Characters | TextTokens::Bytes => Ok(Tokeniser::Numbers(num_tokens)),
    }
}

fn of_text(source: &str, text: &[u8], settings: TextSettings) -> Result<Data> {
    let fail = |why: String| Error::input(format!("reading {source}"), why);
    let tokeniser = match (&settings.tokens, std::str::from_utf8(text)) {
        (TextTokens::Of(known), _) => known.clone(),
        (TextTokens::Bytes, _) => Tokeniser::Bytes,
        (TextTokens::Characters, Ok(text)) => Tokeniser::of_characters(text),
        (TextTokens::Characters, Err(_)) => Tokeniser::Characters(Vec::new()),
    };
    if tokeniser.vocabulary() > MOST_TOKENS {
        let num = tokeniser.vocabulary();
        return Err(fail(format!("it has {num} different characters, and {MOST_TOKENS} are the limit")));
    }
    let tokens = tokeniser.encode(text).map_err(fail)?;
    split(source, tokeniser, tokens, None, &settings)
}

/// Divides tokens, a sequence or rows of `columns`, into those to train and those to test with, which are
/// at the end.
fn split(
    source: &str,
    tokeniser: Tokeniser,
    tokens: Vec<u16>,
    columns: Option<usize>,
    settings: &TextSettings,
) -> Result<Data> {
    let TextSettings { context, stride, test_fraction, .. } = *settings;
    let (unit, context, [train_stride, test_stride]) = match columns {
        None => (1, context, [stride, context]),
        Some(columns) => (columns, columns - 1, [columns; 2]),
    };
    let (len, num_units, tokens) = (tokens.len(), tokens.len() / unit, Rc::new(tokens));
    let share = num_units as f64 * test_fraction;
    let num_test = match columns {
        // rounded up, as in nanoGPT; a share that is a whole number may be computed as slightly more
        None => (share * (1.0 - 1e-12)).ceil(),
        // as of the samples of other files
        Some(_) => share.round(),
    } as usize;
    if columns.is_some() && num_test == 0 && test_fraction > 0.0 {
        let why = format!(
            "a share of {test_fraction} of its {num_units} rows rounds to no test samples; try a larger \
             --test-fraction, or 0"
        );
        return Err(Error::input(format!("reading {source}"), why));
    }
    let num_train = (num_units - num_test) * unit;
    let part = |range: Range<usize>, stride: usize, what: &str| {
        if range.len() <= context {
            let why = match columns {
                None if range.len() == len => format!(
                    "it has {len} tokens, but a sample needs {} (a context of {context} and the one after); \
                     use a longer text or, in training, a smaller --context",
                    context + 1
                ),
                None => format!(
                    "only {} of its {len} tokens are for {what}, but a sample needs {} (a context of \
                     {context} and the one after); try another --test-fraction or, in training, a smaller \
                     --context",
                    range.len(),
                    context + 1
                ),
                Some(_) => {
                    format!("none of its {num_units} rows is for {what}; try another --test-fraction")
                }
            };
            return Err(Error::input(format!("reading {source}"), why));
        }
        let (source, tokeniser, tokens) = (source.to_owned(), tokeniser.clone(), Rc::clone(&tokens));
        Ok(Box::new(TokenText { source, tokeniser, tokens, range, context, stride }))
    };
    let train = part(0..num_train, train_stride, "training")?;
    let test = (num_train < len).then(|| part(num_train..len, test_stride, "testing")).transpose()?;
    Ok(Data { train, test: test.map(|test| test as Box<dyn Dataset>) })
}

impl Dataset for TokenText {
    fn source(&self) -> String {
        self.source.clone()
    }

    fn num_samples(&self) -> usize {
        // the last sample has a token after it
        (self.range.len() - 1 - self.context) / self.stride + 1
    }

    fn features(&self) -> Features {
        Features::Tokens { len: self.context, vocabulary: self.tokeniser.vocabulary() }
    }

    fn targets(&self) -> Targets {
        Targets::Tokens { len: self.context, vocabulary: self.tokeniser.vocabulary() }
    }

    fn tokeniser(&self) -> Option<&Tokeniser> {
        Some(&self.tokeniser)
    }

    fn fingerprint(&mut self) -> Result<u128> {
        let mut hash = Xxh3::new();
        hash.update(self.tokeniser.to_text().as_bytes());
        self.tokens[self.range.clone()].iter().for_each(|token| hash.update(&token.to_le_bytes()));
        // the usual stride is left out, as in files of earlier versions
        if self.stride != self.context {
            hash.update(&(self.stride as u64).to_le_bytes());
        }
        Ok(hash.digest128())
    }

    fn read(&mut self, samples: &[usize], inputs: &mut [f32], targets: &mut [f32]) -> Result<()> {
        for (shift, values) in [inputs, targets].into_iter().enumerate() {
            for (sample, values) in samples.iter().zip(values.chunks_exact_mut(self.context)) {
                let start = self.range.start + sample * self.stride + shift;
                let tokens = &self.tokens[start..start + self.context];
                values.iter_mut().zip(tokens).for_each(|(value, token)| *value = f32::from(*token));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(context: usize, stride: usize) -> TextSettings {
        TextSettings { tokens: TextTokens::Characters, context, stride, test_fraction: 0.4 }
    }

    #[test]
    fn samples_are_windows_and_targets_the_tokens_after() {
        let mut data = of_text("a test", b"abcdefghijklmnopqrst", settings(4, 3)).unwrap();
        // twelve tokens to train with: windows at 0, 3 and 6, the last with a token after it
        assert_eq!(data.train.num_samples(), 3);
        let (mut inputs, mut targets) = ([0.0; 8], [0.0; 8]);
        data.train.read(&[2, 0], &mut inputs, &mut targets).unwrap();
        assert_eq!(inputs, [6.0, 7.0, 8.0, 9.0, 0.0, 1.0, 2.0, 3.0]);
        assert_eq!(targets, [7.0, 8.0, 9.0, 10.0, 1.0, 2.0, 3.0, 4.0]);
        let error = of_text("a test", b"abcdefghijklmnopqrst", settings(8, 1)).err().unwrap().to_string();
        assert!(error.contains("8 of its 20 tokens are for testing"), "{error}");
    }

    #[test]
    fn the_share_to_test_with_is_rounded_up() {
        for (num_tokens, test_fraction, num_test) in
            [(20, 0.9, 18), (100, 0.07, 7), (15, 0.3, 5), (9, 0.25, 3)]
        {
            let settings = TextSettings { test_fraction, ..settings(1, 1) };
            let data = of_text("a test", &b"ab".repeat(num_tokens / 2 + 1)[..num_tokens], settings).unwrap();
            // each sample has a token after it
            assert_eq!(data.train.num_samples(), num_tokens - num_test - 1);
            assert_eq!(data.test.unwrap().num_samples(), num_test - 1);
        }
    }

    #[test]
    fn samples_at_other_strides_are_other_data() {
        let of_stride = |stride| {
            let mut data = of_text("a test", b"abcdefghijklmnopqrst", settings(4, stride)).unwrap();
            data.train.fingerprint().unwrap()
        };
        // the stride that is as long as the context is not part of the fingerprint
        let [two, three, four] = [2, 3, 4].map(of_stride);
        assert!(two != three && three != four && four != two);
    }

    #[test]
    fn tokens_in_hdf5_files_are_one_sequence_or_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.h5");
        let write = |shape: &[usize], name: &str| {
            let file = ::hdf5::File::create(&path).unwrap();
            let numbers: Vec<i32> = (0..20).collect();
            file.new_dataset::<i32>().shape(shape).create(name).unwrap().write_raw(&numbers).unwrap();
        };
        let name = path.display().to_string();
        write(&[20], "x");
        assert!(token_files(&name).is_empty() && open_text(&name, settings(4, 3)).unwrap().is_none());
        write(&[20], "tokens");
        let data = open_text(&name, settings(4, 3)).unwrap().unwrap();
        assert_eq!(data.train.features(), Features::Tokens { len: 4, vocabulary: 20 });
        assert_eq!(data.train.num_samples(), 3);
        write(&[5, 4], "tokens");
        let mut data = open_text(&name, settings(7, 1)).unwrap().unwrap();
        let (mut inputs, mut targets) = ([0.0; 3], [0.0; 3]);
        let mut test = data.test.take().unwrap();
        assert_eq!((data.train.num_samples(), test.num_samples()), (3, 2));
        test.read(&[1], &mut inputs, &mut targets).unwrap();
        assert_eq!((inputs, targets), ([16.0, 17.0, 18.0], [17.0, 18.0, 19.0]));
        // as many rows to test with as of another file
        write(&[10, 2], "tokens");
        for (test_fraction, rows) in [(0.9, 1), (0.8, 2), (0.55, 4)] {
            let data = open_text(&name, TextSettings { test_fraction, ..settings(1, 1) }).unwrap().unwrap();
            assert_eq!(data.train.num_samples(), rows);
        }
        write(&[4, 5], "tokens");
        let open = |test_fraction| open_text(&name, TextSettings { test_fraction, ..settings(1, 1) });
        assert!(open(0.0).unwrap().unwrap().test.is_none());
        let error = open(0.1).err().unwrap().to_string();
        assert!(error.contains("0.1 of its 4 rows rounds to no test samples"), "{error}");
        for (shape, why) in [(&[20, 1][..], "it has rows of length 1"), (&[5, 2, 2], "the shape [5, 2, 2]")] {
            write(shape, "tokens");
            let error = open_text(&name, settings(4, 1)).err().unwrap().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn known_tokens_keep_their_numbers() {
        let tokens = TextTokens::Of(Tokeniser::of_characters("abcdefghijklmnopqrst"));
        let settings = TextSettings { tokens, ..settings(2, 2) };
        let mut data = of_text("a test", b"tsrqponm", settings.clone()).unwrap();
        assert_eq!(data.train.features(), Features::Tokens { len: 2, vocabulary: 20 });
        let mut inputs = [0.0; 2];
        data.train.read(&[0], &mut inputs, &mut []).unwrap();
        assert_eq!(inputs, [19.0, 18.0]);
        let error = of_text("a test", b"abz", settings).err().unwrap().to_string();
        assert!(error.contains("'z' is not in the text"), "{error}");
    }

    #[test]
    fn the_embedded_text_has_the_published_numbers() {
        let tokens = TextTokens::Characters;
        let settings = TextSettings { tokens, context: 64, stride: 1, test_fraction: 0.1 };
        let data = open_shakespeare(settings).unwrap();
        assert_eq!(data.train.features(), Features::Tokens { len: 64, vocabulary: 65 });
        // nanoGPT trains with 1,003,854 characters and tests with 111,540
        assert_eq!(data.train.num_samples(), 1_003_854 - 64);
        assert_eq!(data.test.unwrap().num_samples(), 111_539 / 64);
    }
}
