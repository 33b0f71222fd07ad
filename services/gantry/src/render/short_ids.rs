//! Abbreviated ids: the first characters of UUIDs, as many as a list needs.

/// Minimum number of characters of an abbreviated id: the first group of a UUID.
const MIN_LENGTH: usize = 8;
/// Minimum number of characters of an abbreviated id that begins with a time in milliseconds.
/// Objects that are not listed may have been made in the same minute.
const MIN_TIMED_LENGTH: usize = 13;

/// Returns the number of characters after which all `ids` differ. An abbreviated id does not end
/// with a hyphen.
pub(crate) fn length(ids: &[&str]) -> usize {
    let mut sorted = ids.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let common = |pair: &[&str]| {
        let same = pair[0].bytes().zip(pair[1].bytes()).take_while(|(a, b)| a == b);
        same.count()
    };
    let unique = sorted.windows(2).map(common).max().map_or(0, |common| common + 1);
    // The digit of the version.
    let is_timed = sorted.iter().any(|id| id.as_bytes().get(14) == Some(&b'7'));
    let length = unique.max(if is_timed { MIN_TIMED_LENGTH } else { MIN_LENGTH });
    // A hyphen never distinguishes two ids, so the position after it does not exceed the id.
    let ends_with_hyphen = sorted.iter().any(|id| id.as_bytes().get(length - 1) == Some(&b'-'));
    length + usize::from(ends_with_hyphen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_as_long_as_necessary() {
        let one = "7f3a9c12-0cda-4272-98ab-422792bc0aad";
        assert_eq!(length(&[]), 8);
        assert_eq!(length(&[one]), 8);
        assert_eq!(length(&[one, one]), 8, "the same object twice");
        assert_eq!(length(&[one, "0b2b9c12-0cda-4272-98ab-422792bc0aad"]), 8);
        let near = "7f3a9c12-1cda-4272-98ab-422792bc0aad";
        assert_eq!(&one[..length(&[one, near])], "7f3a9c12-0");
        assert_eq!(length(&["0197c1a2-1cda-7272-98ab-422792bc0aad"]), 13, "it begins with a time");
        let last = "7f3a9c12-0cda-4272-98ab-422792bc0aae";
        assert_eq!(length(&[last, near, one]), 36);
    }
}
