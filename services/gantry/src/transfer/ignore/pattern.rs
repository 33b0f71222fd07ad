//! Patterns of ignore files: the syntax of git, on bytes.
//!
//! [`super::Rules`] parses the lines of a file here and matches paths. The syntax is that of
//! `dir.c` and `wildmatch.c` of git. A pattern that wildmatch of git gives up on is [`Malformed`]
//! here, because its author meant some path.
//!
//! Invariant: the time of a match is bounded by the length of the pattern times the length of the
//! path.

use std::iter;

/// Byte order mark that some editors write before UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Pattern on one line of an ignore file.
#[derive(Debug)]
pub(super) struct Pattern {
    /// Whether matching paths are included again.
    pub(super) is_negative: bool,
    /// Whether the pattern matches only directories.
    directories_only: bool,
    /// Whether the pattern matches the last name of a path, not the whole path.
    name_only: bool,
    /// Bytes before the first special one. Git compares them first, so the `**` of `a**/b` counts
    /// as a start, and the pattern matches `ab`.
    literal: Vec<u8>,
    /// Tokens after the literal bytes.
    rest: Vec<Token>,
}

/// Part of a pattern.
#[derive(Debug)]
enum Token {
    /// This byte.
    Byte(u8),
    /// One byte of the set, never a slash.
    Class(Box<Class>),
    /// Any bytes except slashes: `*`, and a `**` that is not a whole name.
    Star,
    /// Any bytes: a `**` that is a whole name.
    DoubleStar,
    /// The next two tokens, `**` and a slash, are optional.
    Optional,
}

/// Set of bytes.
type Class = [bool; 256];

/// Cause why a line is not a valid pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum Malformed {
    #[error("the bracket `[` is not closed; write `\\[` for a bracket in a name")]
    Unclosed,
    #[error("the text between `[:` and `:]` is not a character class")]
    UnknownClass,
    #[error("the backslash at the end escapes nothing; write `\\\\` for a backslash in a name")]
    TrailingBackslash,
    #[error("the line has a zero byte; the file must be text in UTF-8")]
    ZeroByte,
}

/// Parses the patterns of a file. Each has its line number, starting at 1.
pub(super) fn parse_lines(text: &[u8]) -> impl Iterator<Item = (usize, Result<Pattern, Malformed>)> {
    let text = text.strip_prefix(MARK).unwrap_or(text);
    let lines = text.split(|byte| *byte == b'\n').zip(1..);
    lines.filter_map(|(line, number)| Some((number, Pattern::parse(line).transpose()?)))
}

impl Pattern {
    /// Parses a line without its line feed. `None`: the line is blank or a comment.
    fn parse(line: &[u8]) -> Result<Option<Self>, Malformed> {
        if line.starts_with(b"#") {
            return Ok(None);
        }
        let line = trim_spaces(line.strip_suffix(b"\r").unwrap_or(line));
        if line.is_empty() {
            return Ok(None);
        }
        if line.contains(&0) {
            return Err(Malformed::ZeroByte);
        }
        let (is_negative, pattern) = without(line, |line| line.strip_prefix(b"!"));
        let (directories_only, pattern) = without(pattern, |pattern| pattern.strip_suffix(b"/"));
        let name_only = !pattern.contains(&b'/');
        let (_, pattern) = without(pattern, |pattern| pattern.strip_prefix(b"/"));
        let literal = pattern.iter().take_while(|byte| !b"*?[\\".contains(byte)).count();
        let (literal, rest) = pattern.split_at(literal);
        Ok(Some(Self {
            is_negative,
            directories_only,
            name_only,
            literal: literal.to_owned(),
            rest: parse_tokens(rest)?,
        }))
    }

    /// Returns whether a path matches. It is relative to the directory of the file.
    pub(super) fn matches(&self, path: &[u8], is_directory: bool) -> bool {
        if self.directories_only && !is_directory {
            return false;
        }
        let text = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) if self.name_only => &path[slash + 1..],
            _ => path,
        };
        text.strip_prefix(&self.literal[..]).is_some_and(|text| match_tokens(&self.rest, text))
    }
}

/// Applies `strip`. Returns whether it succeeded, and the rest.
fn without(text: &[u8], strip: impl FnOnce(&[u8]) -> Option<&[u8]>) -> (bool, &[u8]) {
    strip(text).map_or((false, text), |rest| (true, rest))
}

/// Removes unescaped spaces at the end.
fn trim_spaces(line: &[u8]) -> &[u8] {
    let (mut at, mut end) = (0, 0);
    while let Some(byte) = line.get(at) {
        at += if *byte == b'\\' { 2 } else { 1 };
        if *byte != b' ' {
            end = at.min(line.len());
        }
    }
    &line[..end]
}

fn parse_tokens(pattern: &[u8]) -> Result<Vec<Token>, Malformed> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&byte) = pattern.get(at) {
        at += 1;
        match byte {
            b'\\' => {
                tokens.push(Token::Byte(*pattern.get(at).ok_or(Malformed::TrailingBackslash)?));
                at += 1;
            }
            b'?' => tokens.push(Token::Class(Box::new(class_of(|byte| byte != b'/')))),
            b'[' => {
                let (class, length) = parse_class(&pattern[at..])?;
                tokens.push(Token::Class(Box::new(class)));
                at += length;
            }
            b'*' => {
                let first = at - 1;
                at += pattern[at..].iter().take_while(|byte| **byte == b'*').count();
                let (before, behind) = (&pattern[..first], &pattern[at..]);
                let is_name = (before.is_empty() || before.ends_with(b"/"))
                    && (behind.is_empty() || behind.starts_with(b"/") || behind.starts_with(b"\\/"));
                if at - first == 1 || !is_name {
                    tokens.push(Token::Star);
                    continue;
                }
                if behind.starts_with(b"/") {
                    tokens.push(Token::Optional);
                }
                tokens.push(Token::DoubleStar);
            }
            byte => tokens.push(Token::Byte(byte)),
        }
    }
    Ok(tokens)
}

/// Parses a class after its `[`. Also returns its length, including the `]`.
fn parse_class(text: &[u8]) -> Result<(Class, usize), Malformed> {
    let byte_at = |at: usize| text.get(at).copied().ok_or(Malformed::Unclosed);
    let is_negated = matches!(byte_at(0)?, b'!' | b'^');
    let mut class = [false; 256];
    let mut at = usize::from(is_negated);
    // First byte of a possible range.
    let mut start = None;
    loop {
        let mut byte = byte_at(at)?;
        if byte == b'-'
            && let Some(first) = start
            && text.get(at + 1).is_some_and(|next| *next != b']')
        {
            at += 1;
            if byte_at(at)? == b'\\' {
                at += 1;
            }
            for byte in first..=byte_at(at)? {
                class[usize::from(byte)] = true;
            }
            start = None;
        } else if byte == b'['
            && let Some((name, length)) = class_name(&text[at..])?
        {
            for (byte, is_in) in (0..=u8::MAX).zip(&mut class) {
                *is_in |= is_in_class(name, byte).ok_or(Malformed::UnknownClass)?;
            }
            at += length - 1;
            start = None;
        } else {
            if byte == b'\\' {
                at += 1;
                byte = byte_at(at)?;
            }
            class[usize::from(byte)] = true;
            start = Some(byte);
        }
        at += 1;
        // A bracket as the first byte is literal.
        if byte_at(at)? == b']' {
            break;
        }
    }
    Ok((class_of(|byte| class[usize::from(byte)] != is_negated && byte != b'/'), at + 1))
}

fn class_of(is_in: impl Fn(u8) -> bool) -> Class {
    let mut class = [false; 256];
    for (byte, slot) in (0..=u8::MAX).zip(&mut class) {
        *slot = is_in(byte);
    }
    class
}

/// Returns the name at the start of a text such as `[:alpha:]`, and the length of the whole
/// expression. `None`: the bracket is literal.
fn class_name(text: &[u8]) -> Result<Option<(&[u8], usize)>, Malformed> {
    let Some(inner) = text.strip_prefix(b"[:") else { return Ok(None) };
    let end = inner.iter().position(|byte| *byte == b']').ok_or(Malformed::Unclosed)?;
    Ok(inner[..end].strip_suffix(b":").map(|name| (name, end + 3)))
}

/// Returns whether a byte is in a class of git. `None`: no class has that name.
fn is_in_class(name: &[u8], byte: u8) -> Option<bool> {
    Some(match name {
        b"alnum" => byte.is_ascii_alphanumeric(),
        b"alpha" => byte.is_ascii_alphabetic(),
        b"blank" => matches!(byte, b' ' | b'\t'),
        b"cntrl" => byte.is_ascii_control(),
        b"digit" => byte.is_ascii_digit(),
        b"graph" => byte.is_ascii_graphic(),
        b"lower" => byte.is_ascii_lowercase(),
        b"print" => byte.is_ascii_graphic() || byte == b' ',
        b"punct" => byte.is_ascii_punctuation(),
        // Git excludes the form feed and the vertical tab.
        b"space" => matches!(byte, b' ' | b'\t' | b'\n' | b'\r'),
        b"upper" => byte.is_ascii_uppercase(),
        b"xdigit" => byte.is_ascii_hexdigit(),
        _ => return None,
    })
}

/// Returns whether a text matches the tokens. Follows all possible paths through the tokens at
/// once, byte by byte.
fn match_tokens(tokens: &[Token], text: &[u8]) -> bool {
    match (tokens.last(), text.last()) {
        (None, last) => return last.is_none(),
        // The last byte decides most comparisons, such as those with `*.o`.
        (Some(Token::Byte(byte)), last) if last != Some(byte) => return false,
        _ => {}
    }
    let mut reached = vec![false; tokens.len() + 1];
    reached[0] = true;
    pass_empty(tokens, &mut reached);
    let mut next = vec![false; tokens.len() + 1];
    for &byte in text {
        next.fill(false);
        for (at, token) in tokens.iter().enumerate().filter(|(at, _)| reached[*at]) {
            match token {
                Token::Byte(wanted) => next[at + 1] |= *wanted == byte,
                Token::Class(class) => next[at + 1] |= class[usize::from(byte)],
                Token::Star => next[at] |= byte != b'/',
                Token::DoubleStar => next[at] = true,
                Token::Optional => {}
            }
        }
        pass_empty(tokens, &mut next);
        std::mem::swap(&mut reached, &mut next);
    }
    reached[tokens.len()]
}

/// Marks the tokens that are reached by skipping tokens that may match nothing.
fn pass_empty(tokens: &[Token], reached: &mut [bool]) {
    for (at, token) in iter::zip(0.., tokens) {
        if reached[at] {
            match token {
                Token::Star | Token::DoubleStar => reached[at + 1] = true,
                Token::Optional => (reached[at + 1], reached[at + 3]) = (true, true),
                Token::Byte(_) | Token::Class(_) => {}
            }
        }
    }
}
