//! Recognition of the keys that detach the caller from a process.

use crate::cli::detach_keys::DetachKeys;

/// Filter of input that recognizes detach keys, also if they arrive in several pieces.
pub(crate) struct KeyFilter {
    keys: Vec<u8>,
    /// Beginning of the sequence that was typed and not passed on.
    withheld: Vec<u8>,
}

impl KeyFilter {
    pub(crate) fn new(keys: &DetachKeys) -> Self {
        Self { keys: keys.bytes().to_vec(), withheld: Vec::new() }
    }

    /// Returns the input to pass on, and whether the detach keys were typed. Input after the detach
    /// keys is dropped.
    pub(crate) fn filter(&mut self, input: &[u8]) -> (Vec<u8>, bool) {
        let mut passed = Vec::with_capacity(input.len() + self.withheld.len());
        for byte in input {
            self.withheld.push(*byte);
            while !self.keys.starts_with(&self.withheld) {
                passed.push(self.withheld.remove(0));
            }
            if self.withheld == self.keys && !self.withheld.is_empty() {
                self.withheld.clear();
                return (passed, true);
            }
        }
        (passed, false)
    }

    /// Returns whether input is withheld.
    pub(crate) fn is_withholding(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// Returns the withheld input, because the sequence is not completed.
    pub(crate) fn release(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.withheld)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Filters pieces, and returns the passed input. `|` marks the detach keys.
    fn filtered(text: &str, pieces: &[&str]) -> String {
        let mut filter = KeyFilter::new(&text.parse().expect("keys"));
        let mut all = Vec::new();
        for piece in pieces {
            let (passed, detached) = filter.filter(piece.as_bytes());
            all.extend(passed);
            if detached {
                all.push(b'|');
            }
        }
        all.extend(filter.release());
        assert!(!filter.is_withholding());
        String::from_utf8(all).expect("text")
    }

    #[test]
    fn detach_keys_are_recognized_across_pieces() {
        assert_eq!(filtered("ctrl-p,ctrl-q", &["ls\x10\x11gone"]), "ls|");
        assert_eq!(filtered("ctrl-p,ctrl-q", &["ls\x10", "\x11"]), "ls|");
        assert_eq!(filtered("a,b,c", &["a", "b", "c"]), "|");
        assert_eq!(filtered("~", &["x~"]), "x|");
    }

    #[test]
    fn input_of_unfinished_sequence_is_passed() {
        assert_eq!(filtered("ctrl-p,ctrl-q", &["\x10", "\x10x"]), "\x10\x10x");
        assert_eq!(filtered("ctrl-p,ctrl-q", &["\x10\x10\x11"]), "\x10|");
        assert_eq!(filtered("a,a,b", &["aaab"]), "a|");
        assert_eq!(filtered("a,b,a,c", &["abab", "ac"]), "ab|");
        assert_eq!(filtered("ctrl-p,ctrl-q", &["x\x10"]), "x\x10");
        assert_eq!(filtered("", &["\x10\x11"]), "\x10\x11");
    }
}
