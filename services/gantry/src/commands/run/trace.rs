//! Trace of one run: the spans of `gantry` and of the services, as one JSON document.

use std::collections::HashSet;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use rpc::pb::local::{GetTraceRequest, Span};
use serde_json::{Value, json};
use server::telemetry::{RecentSpan, RecentSpans};

use crate::client::connect::Connection;
use crate::client::outage::Patience;
use crate::ending::error::{Refused, refused};
use crate::render::ui::Ui;
use crate::transfer::directories::refuse_links_here;

/// Time for spans of services to end after the run.
const PATIENCE: Duration = Duration::from_secs(2);

/// Returns the trace id of the current span: 32 hexadecimal digits.
pub(crate) fn current_id() -> Option<String> {
    rpc::trace::current()?.split('-').nth(1).map(str::to_owned)
}

/// Writes the spans of `trace_id` into a file. Links in its path are checked again, because a
/// result may have made one.
pub(crate) async fn write(
    (file, follow_links): (&Path, bool),
    trace_id: &str,
    ours: &RecentSpans,
    connection: &Connection,
    ui: &Ui,
) -> anyhow::Result<()> {
    let ours: Vec<Value> = ours.of_trace(trace_id).iter().map(own).collect();
    let mut incomplete = Patience::new(Some(PATIENCE)).of_call();
    let spans = loop {
        let theirs = match fetch(connection, trace_id).await {
            Ok(spans) => spans,
            Err(error) => {
                ui.warn(&format!(
                    "the trace lacks the spans of the services: {}",
                    crate::ending::error::describe(&error)
                ));
                Vec::new()
            }
        };
        let spans: Vec<Value> = ours.iter().cloned().chain(theirs.iter().map(foreign)).collect();
        // A missing parent is a span that has not ended.
        if theirs.is_empty() || orphans(&spans) == 0 || !incomplete.goes_on(None) {
            break spans;
        }
        incomplete.pause().await;
    };
    let document = json!({ "trace_id": trace_id, "spans": spans });
    let links = if follow_links { Ok(()) } else { refuse_links_here(file) };
    links
        .and_then(|()| Ok(std::fs::write(file, serde_json::to_vec_pretty(&document)?)?))
        .with_context(|| format!("cannot write the trace into {file:?}"))?;
    ui.note(&format!("{} spans written into {}", spans.len(), file.display()));
    Ok(())
}

async fn fetch(connection: &Connection, trace_id: &str) -> anyhow::Result<Vec<Span>> {
    let request = GetTraceRequest { trace_id: trace_id.to_owned() };
    match connection.cluster().get_trace(request).await {
        Ok(response) => Ok(response.into_inner().spans),
        Err(status) if Refused::from(status.clone()).is_transient() => {
            Err(refused("the cluster does not answer")(status))
        }
        Err(status) => Err(refused("this cluster does not record spans")(status)),
    }
}

/// Counts the spans whose parent is missing.
fn orphans(spans: &[Value]) -> usize {
    let ids: HashSet<&str> = spans.iter().filter_map(|span| span["span_id"].as_str()).collect();
    let parents = spans.iter().filter_map(|span| span["parent_span_id"].as_str());
    parents.filter(|parent| !ids.contains(parent)).count()
}

fn own(span: &RecentSpan) -> Value {
    json!({
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "name": span.name,
        "service": span.service,
        "start_unix_nano": span.start_unix_nano,
        "end_unix_nano": span.end_unix_nano,
        "attributes": span.attributes.iter().cloned().collect::<std::collections::BTreeMap<_, _>>(),
    })
}

fn foreign(span: &Span) -> Value {
    let attributes: std::collections::BTreeMap<_, _> =
        span.attributes.iter().map(|attribute| (&attribute.name, &attribute.value)).collect();
    json!({
        "trace_id": span.trace_id,
        "span_id": span.span_id,
        "parent_span_id": Some(&span.parent_span_id).filter(|parent| !parent.is_empty()),
        "name": span.name,
        "service": span.service,
        "start_unix_nano": span.start_unix_nano,
        "end_unix_nano": span.end_unix_nano,
        "attributes": attributes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn span_without_parent_is_counted() {
        let span = |id: &str, parent: &str| {
            foreign(&Span { span_id: id.to_owned(), parent_span_id: parent.to_owned(), ..Span::default() })
        };
        assert_eq!(orphans(&[span("a", ""), span("b", "a"), span("c", "b")]), 0);
        assert_eq!(orphans(&[span("a", ""), span("c", "b")]), 1);
    }
}
