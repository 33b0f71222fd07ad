//! Header blocks of archives: the ranges of their fields, and the encoding of numbers.

use std::ops::Range;

use super::BLOCK_BYTES;

pub(super) type Block = [u8; BLOCK_BYTES];

pub(super) const NAME: Range<usize> = 0..100;
pub(super) const MODE: Range<usize> = 100..108;
pub(super) const UID: Range<usize> = 108..116;
pub(super) const GID: Range<usize> = 116..124;
pub(super) const SIZE: Range<usize> = 124..136;
pub(super) const MTIME: Range<usize> = 136..148;
const CHECKSUM: Range<usize> = 148..156;
const TYPE: usize = 156;
pub(super) const LINK: Range<usize> = 157..257;
const MAGIC: Range<usize> = 257..265;
/// Range of the names of the user and of the group.
const NAMES: Range<usize> = 265..329;
pub(super) const MAJOR: Range<usize> = 329..337;
pub(super) const MINOR: Range<usize> = 337..345;
const PREFIX: Range<usize> = 345..500;

/// Ranges of GNU tar's old format for files with holes: in the header, and in each following block
/// of the map.
const OLD_REGIONS: Range<usize> = 386..482;
const OLD_CONTINUES: usize = 482;
const OLD_SIZE: Range<usize> = 483..495;
const MORE_REGIONS: Range<usize> = 0..504;
const MORE_CONTINUES: usize = 504;

const POSIX_MAGIC: &[u8; 8] = b"ustar\x0000";

/// Returns the bytes before the first NUL.
pub(super) fn text(field: &[u8]) -> &[u8] {
    field.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Parses a number: octal digits, or base 256 if the first bit is set. An empty field is 0.
pub(super) fn number(field: &[u8]) -> Option<i64> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // The second bit is the sign.
        let start = i128::from(first & 0x3f) - i128::from(first & 0x40);
        let value = rest
            .iter()
            .try_fold(start, |value, byte| value.checked_mul(256).map(|value| value + i128::from(*byte)))?;
        return i64::try_from(value).ok();
    }
    let digits = field.trim_ascii_start();
    let end = digits.iter().position(|byte| matches!(byte, 0 | b' ')).unwrap_or(digits.len());
    digits[..end].iter().try_fold(0_i64, |value, digit| match digit {
        b'0'..=b'7' => value.checked_mul(8)?.checked_add(i64::from(digit - b'0')),
        _ => None,
    })
}

/// Writes a number as octal digits and NUL if they suffice, otherwise in base 256.
pub(super) fn put_number(field: &mut [u8], value: i64) {
    let digits = field.len() - 1;
    if value >= 0 && value.checked_shr(digits as u32 * 3).unwrap_or(0) == 0 {
        let text = format!("{value:0digits$o}");
        field[..digits].copy_from_slice(text.as_bytes());
        field[digits] = 0;
        return;
    }
    let sign = if value < 0 { 0xff } else { 0 };
    field.fill(sign);
    let bytes = value.to_be_bytes();
    // Fields that need base 256 have at least 8 bytes. In fields of 8 bytes the numbers have 32
    // bits, so the first byte is free.
    let length = bytes.len().min(field.len());
    let start = field.len() - length;
    field[start..].copy_from_slice(&bytes[bytes.len() - length..]);
    field[0] |= 0x80;
}

/// Creates a header with a type and a name. Truncates a long name.
pub(super) fn new(kind: u8, name: &[u8]) -> Block {
    let mut block = [0; BLOCK_BYTES];
    put_text(&mut block[NAME], name);
    block[TYPE] = kind;
    block[MAGIC].copy_from_slice(POSIX_MAGIC);
    for field in [MODE, UID, GID, SIZE, MTIME, MAJOR, MINOR] {
        put_number(&mut block[field], 0);
    }
    block
}

/// Writes as much of a text as fits.
pub(super) fn put_text(field: &mut [u8], text: &[u8]) {
    let length = text.len().min(field.len());
    field[..length].copy_from_slice(&text[..length]);
}

/// Writes the checksum. All other fields must be complete.
pub(super) fn seal(block: &mut Block) {
    let sum = checksums(block).0;
    block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

/// Removes the names of user and group from a header, if its format has them.
pub(super) fn blank_names(block: &mut Block) {
    if block[MAGIC].starts_with(b"ustar") && block[NAMES].iter().any(|byte| *byte != 0) {
        block[NAMES].fill(0);
        seal(block);
    }
}

/// Whether the checksum is right. Old programs sum signed bytes.
pub(super) fn is_sealed(block: &Block) -> bool {
    let (unsigned, signed) = checksums(block);
    number(&block[CHECKSUM]).is_some_and(|sum| sum == unsigned || sum == signed)
}

fn checksums(block: &Block) -> (i64, i64) {
    let bytes =
        || block.iter().enumerate().map(|(at, byte)| if CHECKSUM.contains(&at) { b' ' } else { *byte });
    (bytes().map(i64::from).sum(), bytes().map(|byte| i64::from(byte.cast_signed())).sum())
}

pub(super) fn kind(block: &Block) -> u8 {
    block[TYPE]
}

/// Returns the path in a header, without regard to records.
pub(super) fn path(block: &Block) -> Vec<u8> {
    let name = text(&block[NAME]);
    let prefix = if block[MAGIC].starts_with(b"ustar\0") { text(&block[PREFIX]) } else { &[] };
    if prefix.is_empty() { name.to_vec() } else { [prefix, b"/", name].concat() }
}

/// Returns the data regions of a file in GNU tar's old format, and whether another block of the map
/// follows.
pub(super) fn old_regions(block: &Block, is_first: bool) -> (impl Iterator<Item = Option<(u64, u64)>>, bool) {
    let (regions, continues) =
        if is_first { (OLD_REGIONS, OLD_CONTINUES) } else { (MORE_REGIONS, MORE_CONTINUES) };
    let parsed = block[regions].chunks_exact(24).take_while(|region| region[12] != 0).map(|region| {
        Some((u64::try_from(number(&region[..12])?).ok()?, u64::try_from(number(&region[12..])?).ok()?))
    });
    (parsed, block[continues] != 0)
}

/// Returns the size, including holes, of a file in GNU tar's old format.
pub(super) fn old_size(block: &Block) -> Option<u64> {
    number(&block[OLD_SIZE]).and_then(|size| u64::try_from(size).ok())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn numbers_are_octal_if_they_fit() {
        let mut field = [0; 8];
        put_number(&mut field, 0o7_777_777);
        assert_eq!(&field, b"7777777\0");
        put_number(&mut field, 0o10_000_000);
        assert_eq!(field, [0x80, 0, 0, 0, 0, 0x20, 0, 0]);
        put_number(&mut field, -1);
        assert_eq!(field, [0xff; 8]);
        assert_eq!(number(b"  17 \0"), Some(0o17));
        assert_eq!(number(b"\0\0\0"), Some(0));
        assert_eq!(number(b"18\0"), None);
    }

    proptest! {
        #[test]
        fn numbers_round_trip(value in any::<i64>(), small in any::<u32>()) {
            let mut field = [0; 12];
            put_number(&mut field, value);
            prop_assert_eq!(number(&field), Some(value));
            let mut field = [0; 8];
            put_number(&mut field, small.into());
            prop_assert_eq!(number(&field), Some(small.into()));
        }

        #[test]
        fn number_accepts_any_field(field in proptest::collection::vec(any::<u8>(), 0..40)) {
            number(&field);
        }
    }
}
