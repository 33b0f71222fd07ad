//! Lists and single objects on standard output, as a table, as fields, or as JSON.

use futures::stream::{Stream, TryStreamExt};
use serde_json::Value;

use crate::render::stdout::{print, print_json};
use crate::render::table::{fields, render};

/// Prints at most `limit` items, as a table or as one JSON document per line.
pub(crate) async fn table<T>(
    items: impl Stream<Item = anyhow::Result<T>>,
    limit: usize,
    as_json: bool,
    json: fn(&T) -> Value,
    headers: &[&str],
    row: impl Fn(&T) -> Vec<String>,
) -> anyhow::Result<()> {
    use futures::StreamExt;
    let items: Vec<T> = items.take(limit).try_collect().await?;
    if as_json {
        return items.iter().try_for_each(|item| print_json(&json(item)));
    }
    print(&render(headers, &items.iter().map(row).collect::<Vec<_>>()))
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
