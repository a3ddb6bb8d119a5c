//! The tokens of a text.

/// The pieces of a text that tokens stand for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tokeniser {
    /// A token for each byte.
    Bytes,
    /// A token for each of these characters, in the order of their numbers.
    Characters(Vec<char>),
    /// Numbers that another program made, below this.
    Numbers(usize),
}

impl Tokeniser {
    /// Returns the number of tokens that there are.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokeniser::Bytes => 256,
            Tokeniser::Characters(characters) => characters.len(),
            Tokeniser::Numbers(num) => *num,
        }
    }

    /// Returns the tokeniser with a token for each character of `text`, in the order of their code points.
    pub(super) fn of_characters(text: &str) -> Tokeniser {
        // a list of all characters would take four times the memory of a long text
        let mut is_there = vec![false; char::MAX as usize + 1];
        text.chars().for_each(|character| is_there[character as usize] = true);
        Tokeniser::Characters(('\0'..=char::MAX).filter(|character| is_there[*character as usize]).collect())
    }

    /// Returns the difference of the tokens of `other` from these in words, if there is one; "they" are those
    /// of `other`.
    pub fn difference_of(&self, other: &Tokeniser) -> Option<String> {
        let lacks = |all: &[char], some: &[char]| some.iter().copied().find(|one| !all.contains(one));
        match (other, self) {
            (other, own) if other == own => None,
            (Tokeniser::Characters(theirs), Tokeniser::Characters(own)) => {
                match (lacks(theirs, own), lacks(own, theirs)) {
                    (Some(character), _) => Some(format!("they lack {character:?}")),
                    (_, Some(character)) => Some(format!("they have {character:?} besides")),
                    _ => Some("they are in another order".into()),
                }
            }
            _ => Some(format!("they are {}, not {}", other.words(), self.words())),
        }
    }

    fn words(&self) -> String {
        match self {
            Tokeniser::Bytes => "bytes".into(),
            Tokeniser::Characters(characters) => format!("{} characters", characters.len()),
            Tokeniser::Numbers(num) => format!("numbers below {num}"),
        }
    }

    /// Returns the tokens of `text`.
    ///
    /// # Errors
    /// A character has no token; the message names it.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u16>, String> {
        match self {
            Tokeniser::Bytes => Ok(text.iter().map(|byte| u16::from(*byte)).collect()),
            Tokeniser::Characters(characters) => {
                let text = std::str::from_utf8(text).map_err(|error| {
                    format!(
                        "byte {} is not valid UTF-8; convert the file, or train with --tokens bytes",
                        error.valid_up_to()
                    )
                })?;
                let number = |character: char| {
                    let found = characters.binary_search(&character);
                    found.map(|at| at as u16).map_err(|_| {
                        format!(
                            "{character:?} is not in the text with which the network was trained; leave it \
                             out, or train with --tokens bytes"
                        )
                    })
                };
                text.chars().map(number).collect()
            }
            Tokeniser::Numbers(num) => numbers(text, *num),
        }
    }

    /// Appends what a token stands for to `text`.
    pub fn decode(&self, token: usize, text: &mut Vec<u8>) {
        match self {
            Tokeniser::Bytes => text.push(token as u8),
            Tokeniser::Characters(characters) => {
                let character = characters.get(token).copied().unwrap_or(char::REPLACEMENT_CHARACTER);
                text.extend_from_slice(character.encode_utf8(&mut [0; 4]).as_bytes());
            }
            Tokeniser::Numbers(_) => text.extend_from_slice(format!(" {token}").as_bytes()),
        }
    }

    /// Returns this tokeniser as text, which [`Tokeniser::from_text`] reads.
    pub fn to_text(&self) -> String {
        match self {
            Tokeniser::Bytes => "bytes".into(),
            Tokeniser::Characters(characters) => {
                "characters:".chars().chain(characters.iter().copied()).collect()
            }
            Tokeniser::Numbers(num) => format!("numbers:{num}"),
        }
    }

    /// Returns the tokeniser that `text` describes.
    pub fn from_text(text: &str) -> Option<Tokeniser> {
        match text.split_once(':') {
            None => (text == "bytes").then_some(Tokeniser::Bytes),
            Some(("characters", characters)) => Some(Tokeniser::Characters(characters.chars().collect())),
            Some(("numbers", num)) => num.parse().ok().map(Tokeniser::Numbers),
            Some(_) => None,
        }
    }
}

/// Reads tokens below `num`, written as numbers with spaces between them.
fn numbers(text: &[u8], num: usize) -> Result<Vec<u16>, String> {
    let text = String::from_utf8_lossy(text);
    let read = |word: &str| {
        let token = word.parse().ok().filter(|token| usize::from(*token) < num);
        token.ok_or_else(|| {
            format!("{word:?} is not a token; tokens are numbers from 0 to {}", num.saturating_sub(1))
        })
    };
    let tokens: Vec<u16> = text.split_whitespace().map(read).collect::<Result<_, _>>()?;
    if tokens.is_empty() {
        return Err("give tokens as numbers with spaces between them, such as \"17 4\"".into());
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::Tokeniser;

    #[test]
    fn texts_are_tokens_and_back() {
        for (bytes, text) in [(false, "zwölf Bären"), (true, "zwölf\u{0}")] {
            let tokeniser = if bytes { Tokeniser::Bytes } else { Tokeniser::of_characters(text) };
            let tokens = tokeniser.encode(text.as_bytes()).unwrap();
            assert_eq!(tokens.len(), if bytes { text.len() } else { text.chars().count() });
            let mut decoded = Vec::new();
            tokens.iter().for_each(|token| tokeniser.decode(usize::from(*token), &mut decoded));
            assert_eq!(decoded, text.as_bytes());
            assert_eq!(Tokeniser::from_text(&tokeniser.to_text()), Some(tokeniser));
        }
        let tokeniser = Tokeniser::of_characters("ab");
        assert!(tokeniser.encode(b"ac").unwrap_err().contains("'c'"));
        assert!(tokeniser.encode(b"a\xff").unwrap_err().contains("byte 1 is not valid UTF-8"));
        let numbers = Tokeniser::Numbers(300);
        assert_eq!(numbers.encode(b"7 299\n0").unwrap(), [7, 299, 0]);
        let mut decoded = b"7".to_vec();
        numbers.decode(299, &mut decoded);
        assert_eq!(decoded, b"7 299");
        assert!(
            numbers
                .encode(b"7 300")
                .unwrap_err()
                .contains("\"300\" is not a token; tokens are numbers from 0 to 299")
        );
        assert!(numbers.encode(b"\n").unwrap_err().contains("such as \"17 4\""));
    }
}
