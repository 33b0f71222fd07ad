//! Lists and single objects on standard output, as a table, as fields, or as JSON.

use std::future::ready;
use std::io::IsTerminal;

use anyhow::Context;
use futures::stream::{Stream, TryStreamExt};
use serde_json::Value;

use crate::render::filter::Filter;
use crate::render::short_ids;
use crate::render::stdout::{print, print_json};
use crate::render::table::{fields, plain, render, width};
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
    /// Conditions that all listed items satisfy.
    filters: Vec<Filter>,
}

/// Column that is left out of a table if all its cells are empty.
const OPTIONAL: &str = "NAME";
/// Columns with ids of other objects. Commands accept the beginnings of these ids.
const REFERENCES: [&str; 3] = ["ARTIFACT", "PARENT", "WORKLOAD"];
/// Columns that are left out, in this order, of a table that is wider than the terminal.
const MINOR: [&str; 15] = [
    "PARENT",
    "ATTEMPT",
    "TAGS",
    "PLATFORM",
    "PATH",
    "LAST CONTACT",
    "TTL",
    "REPLICAS",
    "KIND",
    "RESERVES",
    "LAST USED",
    "TEAM",
    "AGE",
    "ARTIFACT",
    "SIZE",
];
/// Columns with texts that are cut to the width of a terminal, and the least width of each.
const TEXTS: [(&str, usize); 6] =
    [("COMMAND", 16), ("FOR", 16), (IMAGE, 40), ("KEPT BY", 16), ("LABEL", 16), ("REASON", 16)];
/// Column with names whose ends say most.
const IMAGE: &str = "IMAGE";
/// Columns of a terminal between two columns of a table.
const GAP: usize = 2;

impl Listing {
    /// Returns the listing of at most `limit` items.
    pub(crate) fn new(limit: usize, format: Format) -> Self {
        Self { limit, format, abbreviates: false, columns: Vec::new(), filters: Vec::new() }
    }

    /// Selects columns of tables.
    pub(crate) fn with_columns(self, columns: Vec<String>) -> Self {
        Self { columns, ..self }
    }

    /// Selects items.
    pub(crate) fn with_filters(self, filters: Vec<Filter>) -> Self {
        Self { filters, ..self }
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
        let is_listed = |item: &T| {
            self.filters.is_empty() || {
                let document = json(item);
                self.filters.iter().all(|filter| filter.holds(&document))
            }
        };
        let items = items.try_filter(|item| ready(is_listed(item)));
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
        let is_short = |at: usize| if at == 0 { self.abbreviates } else { REFERENCES.contains(&headers[at]) };
        if self.format == Format::Table {
            (0..headers.len()).filter(|at| is_short(*at)).for_each(|at| abbreviate(&mut rows, at));
        }
        print(&match (self.columns.as_slice(), self.format) {
            ([], Format::Table) => fitted(headers, rows),
            ([], _) => without_empty(headers, rows),
            (columns, _) => selected(columns, headers, &rows)?,
        })
    }
}

/// Formats a table so that it fits into the terminal. Elsewhere it is as wide as its cells.
pub(crate) fn fitted(headers: &[&str], mut rows: Vec<Vec<String>>) -> String {
    let mut headers = headers.to_vec();
    if std::io::stdout().is_terminal() {
        let columns = usize::try_from(terminal::size().columns).unwrap_or(usize::MAX);
        fit(&mut headers, &mut rows, columns);
    }
    without_empty(&headers, rows)
}

/// Makes a table fit into `columns`: leaves out empty and minor columns, and cuts texts.
fn fit(headers: &mut Vec<&str>, rows: &mut [Vec<String>], columns: usize) {
    let cells = |at: usize, rows: &[Vec<String>]| rows.iter().map(|row| width(&row[at])).max().unwrap_or(0);
    let needed = |widths: &[usize]| widths.iter().map(|width| width + GAP).sum::<usize>() - GAP;
    let widths = |headers: &[&str], rows: &[Vec<String>]| -> Vec<usize> {
        headers.iter().enumerate().map(|(at, header)| cells(at, rows).max(header.len())).collect()
    };
    let least = |headers: &[&str], rows: &[Vec<String>]| {
        let widths = widths(headers, rows).into_iter().zip(headers);
        let least = widths.map(|(width, header)| width.min(least_width(header)));
        needed(&least.collect::<Vec<_>>())
    };
    let is_empty = |at: &usize| !rows.is_empty() && cells(*at, rows) == 0;
    let empty: Vec<_> = (0..headers.len()).filter(is_empty).map(|at| headers[at]).collect();
    for header in empty.into_iter().chain(MINOR) {
        if least(headers, rows) <= columns {
            break;
        }
        leave_out(header, headers, rows);
    }
    let mut widths = widths(headers, rows);
    while needed(&widths) > columns {
        let texts = (0..widths.len()).filter(|at| widths[*at] > least_width(headers[*at]));
        let Some(widest) = texts.max_by_key(|at| widths[*at]) else { break };
        widths[widest] -= 1;
    }
    for row in rows {
        for ((cell, width), header) in row.iter_mut().zip(&widths).zip(headers.iter()) {
            *cell = if *header == IMAGE { ending(cell, *width) } else { plain(cell, *width) };
        }
    }
}

/// Returns the least width of a column. Only texts can be cut.
fn least_width(header: &str) -> usize {
    TEXTS.iter().find(|(name, _)| *name == header).map_or(usize::MAX, |(_, least)| *least)
}

/// Cuts the beginning of a text, so that it takes at most `limit` columns.
fn ending(text: &str, limit: usize) -> String {
    if width(text) <= limit {
        return text.to_owned();
    }
    let starts = text.char_indices().map(|(at, _)| &text[at..]);
    let fits = starts.into_iter().find(|rest| width(rest) < limit);
    format!("…{}", fits.unwrap_or_default())
}

/// Removes the column with this header, if there is one.
fn leave_out(header: &str, headers: &mut Vec<&str>, rows: &mut [Vec<String>]) {
    if let Some(at) = headers.iter().position(|other| *other == header) {
        headers.remove(at);
        rows.iter_mut().for_each(|row| _ = row.remove(at));
    }
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

/// Abbreviates the ids in the column at `at`.
pub(crate) fn abbreviate(rows: &mut [Vec<String>], at: usize) {
    let is_id = |cell: &&str| cell.parse::<domain::ArtifactId>().is_ok();
    let ids: Vec<_> = rows.iter().map(|row| row[at].as_str()).filter(is_id).collect();
    let length = short_ids::length(&ids);
    rows.iter_mut().filter(|row| is_id(&row[at].as_str())).for_each(|row| row[at].truncate(length));
}

/// Formats a table, without the optional column if that is empty.
pub(crate) fn without_empty(headers: &[&str], mut rows: Vec<Vec<String>>) -> String {
    let mut headers = headers.to_vec();
    let optional = headers.iter().position(|header| *header == OPTIONAL);
    if optional.is_some_and(|at| rows.iter().all(|row| row[at].is_empty())) {
        leave_out(OPTIONAL, &mut headers, &mut rows);
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

    fn rows<const N: usize>(rows: &[[&str; N]]) -> Vec<Vec<String>> {
        rows.iter().map(|row| row.map(str::to_owned).to_vec()).collect()
    }

    #[test]
    fn table_fits_into_terminal() {
        let rows = rows(&[
            ["7f3a9c12", "", "main", "a label for people", "owner of the artifact"],
            ["0b2b86a0", "", "main", "", "作業の所有者"],
        ]);
        let at = |columns| {
            let (mut headers, mut rows) = (vec!["ID", "TAGS", "TEAM", "LABEL", "KEPT BY"], rows.clone());
            fit(&mut headers, &mut rows, columns);
            render(&headers, &rows)
        };
        assert!(at(80).starts_with("ID        TAGS  TEAM  LABEL               KEPT BY\n"), "{}", at(80));
        assert!(at(52).contains("7f3a9c12  main  a label for peop…  owner of the art…\n"), "{}", at(52));
        let shown = at(46);
        assert!(shown.contains("7f3a9c12  a label for peop…  owner of the art…\n"), "{shown}");
        assert!(shown.contains("0b2b86a0                     作業の所有者\n"), "{shown}");
        assert_eq!(at(3), at(44), "ids stay whole");
    }

    #[test]
    fn ids_are_abbreviated_beside_words() {
        let one = "7f3a9c12-0cda-4272-98ab-422792bc0aad";
        let mut rows = rows(&[["1", one], ["2", "being pulled"], ["3", ""]]);
        abbreviate(&mut rows, 1);
        assert_eq!([&*rows[0][1], &*rows[1][1], &*rows[2][1]], ["7f3a9c12", "being pulled", ""]);
        assert_eq!([ending("a/語:1", 6), ending("a/語:1", 5), ending("a/語:1", 1)], ["a/語:1", "…語:1", "…"]);
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
