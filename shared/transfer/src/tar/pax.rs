//! Records of PAX headers: `length key=value\n`. Values may contain any bytes.

use crate::entry::Xattr;

/// Prefix of the keys of extended attributes.
const XATTR: &[u8] = b"SCHILY.xattr.";

/// The values of supported records.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Records {
    pub(super) path: Option<Vec<u8>>,
    pub(super) link: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<u32>,
    pub(super) gid: Option<u32>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Vec<Xattr>,
    pub(super) sparse: Sparse,
}

/// The values of records about holes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Sparse {
    pub(super) major: Option<u64>,
    pub(super) minor: Option<u64>,
    pub(super) name: Option<Vec<u8>>,
    /// Size of the file, including holes.
    pub(super) size: Option<u64>,
    /// Alternating offsets and lengths of data regions, in formats 0.0 and 0.1.
    pub(super) map: Option<Vec<u64>>,
}

impl Records {
    /// Adds the records of a header.
    pub(super) fn add(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        while !bytes.is_empty() && bytes[0] != 0 {
            let (key, value, rest) = split(bytes).ok_or("a PAX record is malformed")?;
            self.record(key, value).ok_or("the value of a PAX record is malformed")?;
            bytes = rest;
        }
        Ok(())
    }

    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    fn record(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        if let Some(name) = key.strip_prefix(XATTR) {
            let name = unescape(name);
            self.xattrs.retain(|xattr| xattr.name != name);
            self.xattrs.push(Xattr { name, value: value.to_vec() });
            return Some(());
        }
        // An empty value deletes an earlier one.
        let text = || (!value.is_empty()).then(|| value.to_vec());
        let count = || if value.is_empty() { Some(None) } else { decimal(value).map(Some) };
        let id = || count()?.map(u32::try_from).transpose().ok();
        match key {
            b"path" => self.path = text(),
            b"linkpath" => self.link = text(),
            b"size" => self.size = count()?,
            b"uid" => self.uid = id()?,
            b"gid" => self.gid = id()?,
            b"mtime" if value.is_empty() => self.mtime = None,
            b"mtime" => self.mtime = Some(time(value)?),
            b"GNU.sparse.name" => self.sparse.name = text(),
            b"GNU.sparse.major" => self.sparse.major = count()?,
            b"GNU.sparse.minor" => self.sparse.minor = count()?,
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.sparse.size = count()?,
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => {
                let map = self.sparse.map.get_or_insert_default();
                let is_offset = key == b"GNU.sparse.offset";
                if is_offset != map.len().is_multiple_of(2) {
                    return None;
                }
                map.push(decimal(value)?);
            }
            b"GNU.sparse.map" => {
                let numbers = value.split(|byte| *byte == b',').filter(|number| !number.is_empty());
                self.sparse.map = Some(numbers.map(decimal).collect::<Option<_>>()?);
            }
            _ => {}
        }
        Some(())
    }
}

/// Replaces the names of users and groups in records with dashes of the same length.
pub(super) fn blank_names(records: &mut [u8]) {
    let mut at = 0;
    while let Some((key, value, rest)) = split(&records[at..]) {
        let (is_name, length) = (matches!(key, b"uname" | b"gname"), value.len());
        // A record ends with its value and a newline.
        let end = records.len() - rest.len();
        if is_name {
            records[end - 1 - length..end - 1].fill(b'-');
        }
        at = end;
    }
}

/// Returns the key and value of the first record, and the remaining bytes.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(20).position(|byte| *byte == b' ')?;
    let length = usize::try_from(decimal(&bytes[..space])?).ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    digits.then(|| str::from_utf8(text).ok()?.parse().ok())?
}

/// Parses a decimal fraction into seconds and nanoseconds, rounded down.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(text) => (true, text),
        None => (false, text),
    };
    let (whole, fraction) = match text.iter().position(|byte| *byte == b'.') {
        Some(point) => (&text[..point], &text[point + 1..]),
        None => (text, &[][..]),
    };
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let digits = fraction.iter().chain(std::iter::repeat(&b'0')).take(9);
    let mut nanos = digits.fold(0_u32, |nanos, digit| nanos * 10 + u32::from(digit - b'0'));
    let whole = decimal(whole)?;
    let mut seconds =
        if negative { 0_i64.checked_sub_unsigned(whole)? } else { i64::try_from(whole).ok()? };
    if negative {
        nanos += u32::from(fraction.iter().skip(9).any(|digit| *digit != b'0'));
        if nanos > 0 {
            seconds = seconds.checked_sub(1)?;
            nanos = 1_000_000_000 - nanos;
        }
    }
    Some((seconds, nanos))
}

/// Adds a record.
pub(super) fn put(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    // The length includes its own digits.
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

pub(super) fn put_time(records: &mut Vec<u8>, seconds: i64, nanos: u32) {
    let (sign, seconds, nanos) = match (seconds, nanos) {
        (0.., _) | (_, 0) => (if seconds < 0 { "-" } else { "" }, seconds.unsigned_abs(), nanos),
        _ => ("-", (seconds + 1).unsigned_abs(), 1_000_000_000 - nanos),
    };
    let fraction = if nanos > 0 { format!(".{nanos:09}") } else { String::new() };
    put(records, b"mtime", format!("{sign}{seconds}{fraction}").as_bytes());
}

pub(super) fn put_xattr(records: &mut Vec<u8>, xattr: &Xattr) {
    let mut key = XATTR.to_vec();
    for byte in &xattr.name {
        match byte {
            b'%' => key.extend_from_slice(b"%25"),
            b'=' => key.extend_from_slice(b"%3D"),
            _ => key.push(*byte),
        }
    }
    put(records, &key, &xattr.value);
}

/// Decodes a name in which GNU tar has escaped `=` and `%`.
fn unescape(mut name: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(name.len());
    while let Some((first, rest)) = name.split_first() {
        let (byte, rest) = match name.get(..3) {
            Some(b"%25") => (b'%', &name[3..]),
            Some(b"%3D") => (b'=', &name[3..]),
            _ => (*first, rest),
        };
        plain.push(byte);
        name = rest;
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn mtime(text: &str) -> Option<(i64, u32)> {
        time(text.as_bytes())
    }

    #[test]
    fn times_are_rounded_down() {
        assert_eq!(mtime("5"), Some((5, 0)));
        assert_eq!(mtime("5.25"), Some((5, 250_000_000)));
        assert_eq!(mtime("5.0000000019"), Some((5, 1)));
        assert_eq!(mtime("-5"), Some((-5, 0)));
        assert_eq!(mtime("-0.25"), Some((-1, 750_000_000)));
        assert_eq!(mtime("-4.999999999"), Some((-5, 1)));
        assert_eq!(mtime("-4.9999999991"), Some((-5, 0)));
        for wrong in ["", "-", ".5", "5.x", "+5", "--5", "99999999999999999999", "-9223372036854775808.1"] {
            assert_eq!(mtime(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn record_length_includes_its_digits() {
        // With one more byte of the value, the length needs a third digit.
        for (value, length) in [(93, 99), (94, 101)] {
            let mut records = Vec::new();
            put(&mut records, b"k", &vec![b'v'; value]);
            assert_eq!(records.len(), length);
            assert!(records.starts_with(format!("{length} k=v").as_bytes()));
        }
    }

    proptest! {
        #[test]
        fn records_round_trip(
            path in proptest::collection::vec(1_u8.., 1..300),
            name in proptest::collection::vec(prop_oneof![Just(b'%'), Just(b'='), Just(b'2'), 1_u8..], 1..20),
            value in proptest::collection::vec(any::<u8>(), 0..300),
            seconds in prop_oneof![any::<i64>(), Just(i64::MIN), -5_i64..5],
            nanos in 0_u32..1_000_000_000,
        ) {
            let xattr = Xattr { name, value };
            let mut bytes = Vec::new();
            put(&mut bytes, b"path", &path);
            put_xattr(&mut bytes, &xattr);
            put_time(&mut bytes, seconds, nanos);
            let mut records = Records::default();
            records.add(&bytes).unwrap();
            let expected = Records {
                path: Some(path),
                xattrs: vec![xattr],
                mtime: Some((seconds, nanos)),
                ..Records::default()
            };
            prop_assert_eq!(records, expected);
        }

        #[test]
        fn records_accept_any_bytes(
            bytes in proptest::collection::vec(prop_oneof![any::<u8>(), Just(b' '), b'0'..=b'9', Just(b'=')], 0..60),
        ) {
            let _ = Records::default().add(&bytes);
        }
    }
}
