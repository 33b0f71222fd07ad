//! Names of workloads, and the references by which people name a workload.

use tonic::Status;
use uuid::Uuid;

use crate::invalid_field;

/// Maximum number of characters in the name of a workload.
const MAX_CHARS: usize = 63;
/// Minimum number of digits at the beginning of an id. Fewer digits would match many workloads.
const MIN_DIGITS: usize = 4;
/// Number of hexadecimal digits of an id.
const ID_DIGITS: usize = 32;
/// Reference to the newest workload of a team.
pub const LAST: &str = "last";

/// What people write to name a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reference {
    /// The newest workload of the team.
    Last,
    /// A name, which may also be the beginning of an id.
    Text {
        /// The text as a name. `None`: no workload can have this name.
        name: Option<String>,
        /// The first and the last id that begin with the text. `None`: no id begins with it.
        ids: Option<(Uuid, Uuid)>,
    },
}

/// Checks the name of a workload.
pub fn check(field: &str, name: &str) -> Result<(), Status> {
    check_text(name).map_err(|why| invalid_field(field, why))
}

/// Checks the name of a workload, and returns the reason why it is invalid.
pub fn check_text(name: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric())
        || name.len() > MAX_CHARS
        || !name.chars().all(is_allowed)
    {
        return Err(format!(
            "must be 1 to {MAX_CHARS} characters of `a-z A-Z 0-9 . _ -`, and begin with a letter or a digit"
        ));
    }
    if name == LAST {
        return Err(format!("must not be `{LAST}`, which stands for the newest workload"));
    }
    if Uuid::try_parse(name).is_ok() {
        return Err("must not be a UUID, which stands for the workload with that id".to_owned());
    }
    Ok(())
}

/// Parses a reference to a workload.
pub fn parse_reference(field: &str, text: &str) -> Result<Reference, Status> {
    if text == LAST {
        return Ok(Reference::Last);
    }
    let name = check_text(text).is_ok().then(|| text.to_owned());
    let ids = id_range(text);
    if name.is_none() && ids.is_none() {
        let why =
            format!("must be a name, `{LAST}`, or the first {MIN_DIGITS} to {ID_DIGITS} digits of an id");
        return Err(invalid_field(field, why));
    }
    Ok(Reference::Text { name, ids })
}

/// Parses the beginning of an id as the first and the last id that begin with it. Empty: any id.
pub fn parse_id_prefix(field: &str, text: &str) -> Result<Option<(Uuid, Uuid)>, Status> {
    match id_range(text) {
        _ if text.is_empty() => Ok(None),
        Some(ids) => Ok(Some(ids)),
        None => {
            let why = format!("must be the first {MIN_DIGITS} to {ID_DIGITS} digits of an id");
            Err(invalid_field(field, why))
        }
    }
}

/// Returns the first and the last id that begin with `text`. `None`: `text` is not the beginning of
/// an id, or too short.
#[must_use]
pub fn id_range(text: &str) -> Option<(Uuid, Uuid)> {
    // A hyphen has its place after the digits of a group.
    const HYPHENS: [usize; 4] = [8, 13, 18, 23];
    let has_hyphens = text.contains('-');
    let is_placed = |(at, c): (usize, char)| (c == '-') == (has_hyphens && HYPHENS.contains(&at));
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let is_digits = digits.chars().all(|c| c.is_ascii_hexdigit());
    if !is_digits || !(MIN_DIGITS..=ID_DIGITS).contains(&digits.len()) || !text.char_indices().all(is_placed)
    {
        return None;
    }
    let filled =
        |fill: &str| Uuid::try_parse(&(digits.clone() + &fill.repeat(ID_DIGITS - digits.len()))).ok();
    Some((filled("0")?, filled("f")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_is_neither_id_nor_word() {
        for name in ["a", "build-3", "0", "A.b_c-", "last2", "01a2", &"x".repeat(63)] {
            assert_eq!(check_text(name), Ok(()), "{name}");
        }
        let id = Uuid::now_v7();
        let plain = id.simple().to_string();
        for name in
            ["", "-a", ".", "a/b", "a b", "ä", "a\n", "last", &id.to_string(), &plain, &"x".repeat(64)]
        {
            assert!(check_text(name).is_err(), "{name}");
        }
    }

    #[test]
    fn beginning_of_id_is_a_range() {
        let range = |text: &str| id_range(text).map(|(first, last)| [first.to_string(), last.to_string()]);
        let expected = |first: &str, last: &str| Some([first.to_owned(), last.to_owned()]);
        let of_four =
            expected("01a20000-0000-0000-0000-000000000000", "01a2ffff-ffff-ffff-ffff-ffffffffffff");
        assert_eq!(range("01a2"), of_four);
        assert_eq!(range("01A2"), of_four);
        let of_ten = expected("01a2bbbb-cc00-0000-0000-000000000000", "01a2bbbb-ccff-ffff-ffff-ffffffffffff");
        assert_eq!(range("01a2bbbb-cc"), of_ten);
        assert_eq!(range("01a2bbbbcc"), of_ten);
        assert_eq!(range("01a2bbbb-"), range("01a2bbbb"));
        let id = Uuid::now_v7();
        assert_eq!(id_range(&id.to_string()), Some((id, id)));
        assert_eq!(id_range(&id.simple().to_string()), Some((id, id)));
        for wrong in ["", "01a", "01a2-", "-01a2", "01a2bbbb--cc", "01g2", "01a2bbbb-cccc-dd-", "build-3"] {
            assert_eq!(id_range(wrong), None, "{wrong}");
        }
        assert_eq!(id_range(&format!("{id}0")), None);
    }

    #[test]
    fn reference_is_last_name_or_id() {
        let parse = |text: &str| parse_reference("reference", text);
        assert_eq!(parse("last").expect("a reference"), Reference::Last);
        let both = parse("01a2").expect("a reference");
        assert_eq!(both, Reference::Text { name: Some("01a2".to_owned()), ids: id_range("01a2") });
        let name = parse("build-3").expect("a reference");
        assert_eq!(name, Reference::Text { name: Some("build-3".to_owned()), ids: None });
        let id = Uuid::now_v7().to_string();
        assert_eq!(parse(&id).expect("a reference"), Reference::Text { name: None, ids: id_range(&id) });
        for wrong in ["", "a b", "-", "a\0", &"x".repeat(64)] {
            let refused = parse(wrong).expect_err(wrong);
            assert!(refused.message().contains("reference"), "{refused}");
        }
    }
}
