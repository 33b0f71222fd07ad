//! Keys that detach the caller from a process, in the syntax of Docker.

use std::fmt;
use std::str::FromStr;

/// Sequence of keys that detaches the caller. An empty sequence never does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DetachKeys {
    keys: Vec<u8>,
    text: String,
}

impl DetachKeys {
    /// Returns the bytes that a terminal sends for the keys.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.keys
    }
}

impl FromStr for DetachKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let keys = text.split(',').filter(|_| !text.is_empty()).map(key);
        Ok(Self { keys: keys.collect::<Result<_, _>>()?, text: text.to_owned() })
    }
}

impl fmt::Display for DetachKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Parses one key: an ASCII character, `ctrl-` and a character, or `DEL`.
fn key(name: &str) -> Result<u8, String> {
    let control = |rest: &str| match rest.as_bytes() {
        [key @ (b'@' | b'a'..=b'z' | b'A'..=b'Z' | b'[' | b'\\' | b']' | b'^' | b'_')] => Some(key & 0x1f),
        _ => None,
    };
    match name.as_bytes() {
        [key @ 0x20..0x7f] => Ok(*key),
        b"DEL" => Ok(0x7f),
        _ => name.strip_prefix("ctrl-").and_then(control).ok_or_else(|| {
            format!("{name:?} is not a key; write characters, or ctrl- and one of @ a-z [ \\ ] ^ _, separated by commas")
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> Vec<u8> {
        text.parse::<DetachKeys>().expect("keys").keys
    }

    #[test]
    fn keys_have_syntax_of_docker() {
        assert_eq!(keys("ctrl-p,ctrl-q"), [0x10, 0x11]);
        assert_eq!(
            keys("a,B,ctrl-@,ctrl-[,ctrl-\\,ctrl-],ctrl-^,ctrl-_,DEL,~"),
            *b"aB\0\x1b\x1c\x1d\x1e\x1f\x7f~"
        );
        assert_eq!(keys(""), b"");
        for wrong in ["ctrl-", "ctrl-1", "ctrl-pp", "ab", "ctrl-p,", ",", "é", "F1", "\u{1}"] {
            assert!(wrong.parse::<DetachKeys>().is_err(), "{wrong}");
        }
    }
}
