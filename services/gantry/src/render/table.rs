//! Tables, sizes, durations and untrusted texts for people.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::Table;
use comfy_table::presets::NOTHING;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// Formats a table with two spaces between columns.
pub(crate) fn render(headers: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).set_header(headers).add_rows(rows);
    table.column_iter_mut().for_each(|column| _ = column.set_padding((0, 2)));
    table.trim_fmt() + "\n"
}

/// Formats a table without its empty columns.
pub(crate) fn filled(headers: &[&str], rows: &[Vec<String>]) -> String {
    let is_filled =
        |column: &usize| rows.iter().any(|row| row.get(*column).is_some_and(|cell| !cell.is_empty()));
    let columns: Vec<_> = (0..headers.len()).filter(is_filled).collect();
    let headers: Vec<_> = columns.iter().map(|column| headers[*column]).collect();
    let row = |row: &Vec<String>| columns.iter().filter_map(|column| row.get(*column).cloned()).collect();
    render(&headers, &rows.iter().map(row).collect::<Vec<_>>())
}

/// Formats names and values, one per line. Further lines of a value are indented, and empty values
/// are left out.
pub(crate) fn fields(fields: &[(&str, String)]) -> String {
    let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
    let mut text = String::new();
    for (name, value) in fields.iter().filter(|(_, value)| !value.is_empty()) {
        let value = value.replace('\n', &format!("\n{:width$}", ""));
        // Writing to a string cannot fail.
        _ = writeln!(text, "{:width$}{value}", format!("{name}:"));
    }
    text
}

/// Formats a size, such as `17 B` or `1.2 MiB`.
pub(crate) fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    #[expect(clippy::cast_precision_loss, reason = "shown with one digit behind the point")]
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Formats a duration: `340 ms`, `1.5 s`, `42 s`, `5 min`, `3 h`, `2 d`.
pub(crate) fn duration(duration: Duration) -> String {
    match duration.as_secs() {
        0 => format!("{} ms", duration.as_millis()),
        1..10 => format!("{:.1} s", duration.as_secs_f64()),
        seconds @ 10..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// Formats a number with a noun, such as `1 file` or `2 files`.
pub(crate) fn count(number: u64, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Returns whether a character controls a terminal instead of being shown: control characters, and
/// characters that change the direction of text.
pub(crate) fn changes_terminal(c: char) -> bool {
    let turns =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || turns
}

/// Makes untrusted text safe for a terminal, and cuts it to `limit` columns.
pub(crate) fn plain(text: &str, limit: usize) -> String {
    let mut plain: String = text.chars().map(|c| if changes_terminal(c) { '?' } else { c }).collect();
    if width(&plain) > limit {
        let mut left = limit.saturating_sub(1);
        let fits = |c: &char| {
            // This selector makes the character before it wide.
            let columns = if *c == '\u{fe0f}' { 1 } else { c.width().unwrap_or(0) };
            left.checked_sub(columns).map(|rest| left = rest).is_some()
        };
        plain = plain.chars().take_while(fits).collect();
        plain.push('…');
    }
    plain
}

/// Returns the number of columns that a text takes on a terminal.
pub(crate) fn width(text: &str) -> usize {
    text.width()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fit_widest_cell() {
        let rows = vec![
            vec!["a".to_owned(), "long name".to_owned(), "x".to_owned()],
            vec!["größer".to_owned(), String::new(), String::new()],
        ];
        assert_eq!(
            render(&["ID", "NAME", "REASON"], &rows),
            "ID      NAME       REASON\na       long name  x\ngrößer\n"
        );
        assert_eq!(render(&["ID", "NAME"], &[]), "ID  NAME\n");
        let wide = vec![vec!["語".to_owned(), "x".to_owned()]];
        assert_eq!(render(&["ID", "NAME"], &wide), "ID  NAME\n語  x\n", "it takes two columns of a terminal");
        let rows = vec![vec!["1".to_owned(), String::new(), "x".to_owned()], vec![String::new(); 3]];
        assert_eq!(filled(&["ID", "NAME", "REASON"], &rows), "ID  REASON\n1   x\n\n");
    }

    #[test]
    fn empty_fields_are_left_out() {
        let shown = fields(&[("id", "7".to_owned()), ("why", String::new()), ("kept", "a\nb".to_owned())]);
        assert_eq!(shown, "id:   7\nkept: a\n      b\n");
    }

    #[test]
    fn numbers_are_formatted() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1024), "1.0 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(duration(Duration::from_millis(340)), "340 ms");
        assert_eq!(duration(Duration::from_secs(119)), "119 s");
        assert_eq!(duration(Duration::from_secs(3600)), "60 min");
        assert_eq!(duration(Duration::from_secs(200_000)), "2 d");
        assert_eq!(count(1, "file"), "1 file");
        assert_eq!(count(0, "file"), "0 files");
    }

    #[test]
    fn untrusted_text_cannot_control_terminal() {
        assert_eq!(plain("a\u{1b}[31mb\n", 20), "a?[31mb?");
        assert_eq!(plain("a\u{202e}b\u{9b}c", 20), "a?b?c", "nor can its direction be turned");
        assert_eq!(plain("abcdef", 4), "abc…");
        assert_eq!([plain("語語語", 6), plain("語語語", 5), plain("語語語", 4)], ["語語語", "語語…", "語…"]);
        assert_eq!(plain("e\u{301}e\u{301}", 2), "e\u{301}e\u{301}", "an accent takes no column");
    }
}
