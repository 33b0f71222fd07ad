//! `gantry schema`: JSON Schema of the documents that `--json` prints.

use anyhow::{Context, bail};
use serde_json::Value;

use crate::cli::args::SchemaArgs;
use crate::render::stdout::print;

/// Schema of all documents. A test of `gantry list` makes it.
const SCHEMA: &str = include_str!("../../../../docs/json-schema.json");

/// Executes `gantry schema`.
pub(crate) fn schema(args: &SchemaArgs) -> anyhow::Result<()> {
    print(&of(args.document.as_deref())?)
}

/// Returns the schema of one document, or of all.
fn of(document: Option<&str>) -> anyhow::Result<String> {
    let Some(named) = document else { return Ok(SCHEMA.to_owned()) };
    let mut schema: Value = serde_json::from_str(SCHEMA).context("the schema is not JSON")?;
    let known: Vec<_> = schema["$defs"].as_object().into_iter().flatten().map(|(name, _)| name).collect();
    let is_named = |name: &&&String| name.as_str() == named || named.strip_suffix('s') == Some(name.as_str());
    let Some(name) = known.iter().find(is_named) else {
        let known: Vec<_> = known.iter().map(|name| name.as_str()).collect();
        bail!("cannot print the schema of {named:?}: the documents are {}", known.join(", "));
    };
    schema["$ref"] = format!("#/$defs/{name}").into();
    Ok(format!("{schema:#}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_of_one_document_refers_to_it() {
        for (named, name) in [("workload", "workload"), ("base-types", "base-type"), ("status", "status")] {
            let schema: Value = serde_json::from_str(&of(Some(named)).expect("known")).expect("JSON");
            assert_eq!(schema["$ref"], format!("#/$defs/{name}"));
            assert!(schema["$defs"][name].is_object(), "{name}");
        }
        let unknown = of(Some("job")).expect_err("refused").to_string();
        assert!(unknown.contains("the documents are artifact, base-type, "), "{unknown}");
    }
}
