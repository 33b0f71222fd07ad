//! Lists and single objects on standard output, as a table, as fields, or as JSON.

use futures::stream::{Stream, TryStreamExt};
use serde_json::Value;

use crate::render::short_ids;
use crate::render::stdout::{print, print_json};
use crate::render::table::{fields, render};

/// How a list is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    /// A table with abbreviated ids, if commands accept abbreviated ids of the kind.
    Table,
    /// A table with whole ids and texts.
    Wide,
    /// The whole ids, one per line.
    Ids,
    /// One JSON document per line.
    Json,
}

/// Format and length of a list.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listing {
    limit: usize,
    format: Format,
    abbreviates: bool,
}

/// Column that is left out of a table if all its cells are empty.
const OPTIONAL: &str = "NAME";

impl Listing {
    /// Returns the listing of at most `limit` items.
    pub(crate) fn new(limit: usize, format: Format) -> Self {
        Self { limit, format, abbreviates: false }
    }

    /// Returns whether a table has whole texts.
    pub(crate) fn is_wide(self) -> bool {
        self.format == Format::Wide
    }

    /// Returns whether JSON is printed.
    pub(crate) fn is_json(self) -> bool {
        self.format == Format::Json
    }

    /// Abbreviates the ids of a table. Commands accept abbreviated ids of the listed kind.
    pub(crate) fn short(self) -> Self {
        Self { abbreviates: self.format == Format::Table, ..self }
    }

    /// Prints the items. The first column of `row` is the id.
    pub(crate) async fn print<T>(
        self,
        items: impl Stream<Item = anyhow::Result<T>>,
        json: fn(&T) -> Value,
        headers: &[&str],
        row: impl Fn(&T) -> Vec<String>,
    ) -> anyhow::Result<()> {
        use futures::StreamExt;
        let items: Vec<T> = items.take(self.limit).try_collect().await?;
        if self.is_json() {
            return items.iter().try_for_each(|item| print_json(&json(item)));
        }
        let mut rows: Vec<_> = items.iter().map(row).collect();
        if self.format == Format::Ids {
            return print(&rows.iter().map(|row| format!("{}\n", row[0])).collect::<String>());
        }
        if self.abbreviates {
            abbreviate(&mut rows);
        }
        print(&without_empty(headers, rows))
    }
}

/// Abbreviates the ids in the first column.
pub(crate) fn abbreviate(rows: &mut [Vec<String>]) {
    let ids: Vec<_> = rows.iter().map(|row| row[0].as_str()).collect();
    let length = short_ids::length(&ids);
    rows.iter_mut().for_each(|row| row[0].truncate(length));
}

/// Formats a table, without the optional column if that is empty.
pub(crate) fn without_empty(headers: &[&str], mut rows: Vec<Vec<String>>) -> String {
    let mut headers = headers.to_vec();
    if let Some(at) = headers.iter().position(|header| *header == OPTIONAL)
        && rows.iter().all(|row| row[at].is_empty())
    {
        headers.remove(at);
        rows.iter_mut().for_each(|row| _ = row.remove(at));
    }
    render(&headers, &rows)
}

/// Prints one object, as fields or as a JSON document.
pub(crate) fn one<T>(
    item: &T,
    as_json: bool,
    json: fn(&T) -> Value,
    shown: impl FnOnce(&T) -> Vec<(&'static str, String)>,
) -> anyhow::Result<()> {
    if as_json { print_json(&json(item)) } else { print(&fields(&shown(item))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optional_column_is_left_out_if_empty() {
        let row = |name: &str| vec!["1".to_owned(), name.to_owned(), "x".to_owned()];
        assert_eq!(without_empty(&["ID", "NAME", "END"], vec![row(""), row("")]), "ID  END\n1   x\n1   x\n");
        let shown = without_empty(&["ID", "NAME", "END"], vec![row("a"), row("")]);
        assert_eq!(shown, "ID  NAME  END\n1   a     x\n1         x\n");
    }
}
