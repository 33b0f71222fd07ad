//! Recognition of the answers of the local terminal to queries.
//!
//! A program asks its terminal for the position of the cursor or for a color, and the terminal
//! types the answer. When a caller attaches again, old output is shown again with its queries. The
//! program would take these answers for keys.

const ESCAPE: u8 = 0x1b;
const BELL: u8 = 0x07;
/// Maximum size of an answer, in bytes.
const MAX_ANSWER: usize = 4096;

/// Filter of input that drops answers, also if they arrive in several pieces.
#[derive(Default)]
pub(crate) struct AnswerFilter {
    /// Input that may be the beginning of an answer.
    withheld: Vec<u8>,
}

/// What input begins with.
enum Beginning {
    /// An answer of this length.
    Answer(usize),
    /// A part of something that may become an answer.
    Unfinished,
    Key,
}

impl AnswerFilter {
    /// Returns the input without answers.
    pub(crate) fn filter(&mut self, input: &[u8]) -> Vec<u8> {
        self.withheld.extend_from_slice(input);
        let (mut passed, mut rest) = (Vec::new(), &self.withheld[..]);
        while let [first, after @ ..] = rest {
            match beginning(rest) {
                Beginning::Answer(length) => rest = &rest[length..],
                Beginning::Unfinished if rest.len() < MAX_ANSWER => break,
                Beginning::Unfinished | Beginning::Key => {
                    passed.push(*first);
                    rest = after;
                }
            }
        }
        self.withheld = rest.to_vec();
        passed
    }

    /// Returns whether input is withheld.
    pub(crate) fn is_withholding(&self) -> bool {
        !self.withheld.is_empty()
    }

    /// Returns the withheld input, because nothing follows it.
    pub(crate) fn release(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.withheld)
    }
}

fn beginning(input: &[u8]) -> Beginning {
    match input {
        [ESCAPE] => Beginning::Unfinished,
        [ESCAPE, b'[', rest @ ..] => {
            let parameters = rest.iter().take_while(|byte| (0x20..0x40).contains(*byte)).count();
            let (parameters, rest) = rest.split_at(parameters);
            let length = 2 + parameters.len() + 1;
            match (rest.first(), parameters) {
                (None, _) => Beginning::Unfinished,
                // Position of the cursor, sizes, states.
                (Some(b'R' | b'n' | b't' | b'x'), [b'0'..=b'9' | b'?', ..]) => Beginning::Answer(length),
                // Kind of the terminal, state of the keyboard.
                (Some(b'c' | b'u'), [b'?' | b'>' | b'=', ..]) => Beginning::Answer(length),
                // State of a mode.
                (Some(b'y'), [.., b'$']) => Beginning::Answer(length),
                _ => Beginning::Key,
            }
        }
        // Colors, names and settings are texts.
        [ESCAPE, b']' | b'P' | b'_', rest @ ..] => {
            let end = rest.iter().position(|byte| matches!(*byte, BELL | ESCAPE));
            match end.map(|at| (at, &rest[at..])) {
                Some((at, [BELL, ..])) => Beginning::Answer(2 + at + 1),
                Some((at, [ESCAPE, b'\\', ..])) => Beginning::Answer(2 + at + 2),
                None | Some((_, [_])) => Beginning::Unfinished,
                Some(_) => Beginning::Key,
            }
        }
        _ => Beginning::Key,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_dropped_and_keys_pass() {
        let answers = [
            "\x1b[24;80R",
            "\x1b[0n",
            "\x1b[?62;22c",
            "\x1b[>1;10;0c",
            "\x1b[?2026;2$y",
            "\x1b[?0u",
            "\x1b[8;24;80t",
            "\x1b]11;rgb:0000/0000/0000\x1b\\",
            "\x1b]10;rgb:ffff/ffff/ffff\x07",
            "\x1bP>|tmux 3.5a\x1b\\",
        ];
        let keys = ["a", "\x1b[A", "\x1b[1;5C", "\x1b[3~", "\x1bOP", "\x1b[97u", "\x1b[M !!", "é", "\x1bb"];
        let typed: String = keys.iter().zip(answers).map(|(key, answer)| format!("{key}{answer}")).collect();
        for size in 1..typed.len() {
            let mut filter = AnswerFilter::default();
            let mut passed: Vec<u8> =
                typed.as_bytes().chunks(size).flat_map(|piece| filter.filter(piece)).collect();
            passed.extend(filter.release());
            assert_eq!(String::from_utf8_lossy(&passed), keys.concat(), "pieces of {size}");
        }
    }
}
