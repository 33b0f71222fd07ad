//! Lists and single objects on standard output, as a table, as fields, or as JSON.

use std::io::IsTerminal;

use anyhow::Context;
use futures::stream::{Stream, TryStreamExt};
use serde_json::Value;

use crate::render::short_ids;
use crate::render::stdout::{print, print_json};
use crate::render::table::{fields, plain, render};
use crate::render::template::Template;
use crate::render::terminal;

/// How a list is printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Format {
    /// A table with abbreviated ids, if commands accept abbreviated ids of the kind.
    Table,
    /// A table with whole ids and texts.
    Wide,
    /// The whole ids, one per line.
    Ids,
    /// One JSON document per line.
    Json,
    /// The text of a template for each item, one per line. The fields are those of the JSON
    /// document.
    Template(Template),
}

/// Format and length of a list.
#[derive(Debug, Clone)]
pub(crate) struct Listing {
    limit: usize,
    format: Format,
    abbreviates: bool,
    /// Headers of the columns to print, in any case. Empty: all columns.
    columns: Vec<String>,
}

/// Column that is left out of a table if all its cells are empty.
const OPTIONAL: &str = "NAME";
/// Last columns that are cut to the width of a terminal. Other columns have ids.
const CUT: [&str; 3] = ["COMMAND", "KEPT BY", "REASON"];
/// Least width to which a column is cut.
const MIN_CUT: usize = 10;

impl Listing {
    /// Returns the listing of at most `limit` items.
    pub(crate) fn new(limit: usize, format: Format) -> Self {
        Self { limit, format, abbreviates: false, columns: Vec::new() }
    }

    /// Selects columns of tables.
    pub(crate) fn with_columns(self, columns: Vec<String>) -> Self {
        Self { columns, ..self }
    }

    /// Returns whether a table has whole texts.
    pub(crate) fn is_wide(&self) -> bool {
        self.format == Format::Wide
    }

    /// Returns whether the fields of JSON documents are printed.
    pub(crate) fn is_json(&self) -> bool {
        matches!(self.format, Format::Json | Format::Template(_))
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
        match &self.format {
            Format::Json => return items.iter().try_for_each(|item| print_json(&json(item))),
            Format::Template(template) => {
                return items
                    .iter()
                    .try_for_each(|item| print(&format!("{}\n", template.render(&json(item))?)));
            }
            Format::Table | Format::Wide | Format::Ids => {}
        }
        let mut rows: Vec<_> = items.iter().map(row).collect();
        if self.format == Format::Ids {
            return print(&rows.iter().map(|row| format!("{}\n", row[0])).collect::<String>());
        }
        if self.abbreviates {
            abbreviate(&mut rows);
        }
        if self.format == Format::Table
            && headers.last().is_some_and(|last| CUT.contains(last))
            && std::io::stdout().is_terminal()
        {
            let columns = usize::try_from(terminal::size().columns).unwrap_or(usize::MAX);
            cut(headers, &mut rows, columns);
        }
        if self.columns.is_empty() {
            return print(&without_empty(headers, rows));
        }
        print(&selected(&self.columns, headers, &rows)?)
    }
}

/// Cuts the texts of the last column so that a table fits into `columns`. Other cells stay whole.
fn cut(headers: &[&str], rows: &mut [Vec<String>], columns: usize) {
    let last = headers.len().saturating_sub(1);
    let width = |at: usize| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        let widest = cells.max().unwrap_or(0);
        let is_left_out = headers[at] == OPTIONAL && widest == 0;
        if is_left_out { 0 } else { widest.max(headers[at].len()) + 2 }
    };
    let left = columns.saturating_sub((0..last).map(width).sum()).max(MIN_CUT);
    rows.iter_mut().for_each(|row| row[last] = plain(&row[last], left));
}

/// Formats a table of the named columns, in their order.
fn selected(columns: &[String], headers: &[&str], rows: &[Vec<String>]) -> anyhow::Result<String> {
    let position = |column: &String| {
        headers.iter().position(|header| header.eq_ignore_ascii_case(column)).with_context(|| {
            let names: Vec<_> = headers.iter().map(|header| header.to_lowercase()).collect();
            format!("there is no column {column:?}; the columns are {}", names.join(", "))
        })
    };
    let positions: Vec<_> = columns.iter().map(position).collect::<Result<_, _>>()?;
    let headers: Vec<_> = positions.iter().map(|at| headers[*at]).collect();
    let row = |row: &Vec<String>| positions.iter().map(|at| row[*at].clone()).collect();
    Ok(render(&headers, &rows.iter().map(row).collect::<Vec<_>>()))
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
    fn last_column_is_cut_to_width() {
        let row = |command: &str| vec!["7f3a9c12".to_owned(), String::new(), command.to_owned()];
        let headers = ["ID", "NAME", "COMMAND"];
        let mut rows = [row("make all of it"), row("true")];
        cut(&headers, &mut rows, 22);
        assert_eq!([&rows[0][2], &rows[1][2]], ["make all of…", "true"]);
        cut(&headers, &mut rows, 3);
        assert_eq!(rows[0][2].chars().count(), MIN_CUT);
    }

    #[test]
    fn columns_are_selected_by_header() {
        let rows = [vec!["1".to_owned(), "a".to_owned(), "x".to_owned()]];
        let columns = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let headers = ["ID", "NAME", "LAST USED"];
        let shown = selected(&columns(&["last used", "id"]), &headers, &rows).expect("columns");
        assert_eq!(shown, "LAST USED  ID\nx          1\n");
        let unknown = selected(&columns(&["age"]), &headers, &rows).expect_err("refused");
        assert_eq!(unknown.to_string(), "there is no column \"age\"; the columns are id, name, last used");
    }

    #[test]
    fn optional_column_is_left_out_if_empty() {
        let row = |name: &str| vec!["1".to_owned(), name.to_owned(), "x".to_owned()];
        assert_eq!(without_empty(&["ID", "NAME", "END"], vec![row(""), row("")]), "ID  END\n1   x\n1   x\n");
        let shown = without_empty(&["ID", "NAME", "END"], vec![row("a"), row("")]);
        assert_eq!(shown, "ID  NAME  END\n1   a     x\n1         x\n");
    }
}
