//! Filters of lists, which compare the fields of JSON documents.

use serde_json::Value;

/// Condition on the JSON document of an object.
#[derive(Debug, Clone)]
pub(crate) struct Filter {
    /// Paths of the compared fields, such as `spec.name`. One of them must match.
    pub(crate) fields: &'static [&'static str],
    /// Values, one of which the field must have.
    pub(crate) values: Vec<String>,
    /// Whether the beginning of the field is compared, and of each part after a slash.
    pub(crate) by_beginning: bool,
}

impl Filter {
    /// Returns whether the object of a document is listed.
    pub(crate) fn holds(&self, document: &Value) -> bool {
        let matches = |text: &str, value: &str| match self.by_beginning {
            true => text.starts_with(value) || text.contains(&format!("/{value}")),
            false => text == value,
        };
        let holds = |text: &str| self.values.iter().any(|value| matches(text, value));
        self.fields.iter().any(|field| any_text(document, &field.split('.').collect::<Vec<_>>(), &holds))
    }
}

/// Returns whether a text at `path` satisfies a condition. All items of lists are tried.
fn any_text(value: &Value, path: &[&str], holds: &impl Fn(&str) -> bool) -> bool {
    match (value, path) {
        (Value::Array(items), _) => items.iter().any(|item| any_text(item, path, holds)),
        (Value::String(text), []) => holds(text),
        (Value::Object(fields), [first, rest @ ..]) => {
            fields.get(*first).is_some_and(|field| any_text(field, rest, holds))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn filter_compares_fields_of_document() {
        let document = json!({
            "state": "finished", "outcome": "failed", "spec": { "name": "docker.io/library/alpine:3" },
            "replicas": [{ "worker_id": "1" }, { "worker_id": "2" }], "location": null,
        });
        let holds = |fields, value: &str, by_beginning| {
            Filter { fields, values: vec!["x".to_owned(), value.to_owned()], by_beginning }.holds(&document)
        };
        assert!(holds(&["state", "outcome"], "failed", false));
        assert!(holds(&["replicas.worker_id"], "2", false));
        assert!(holds(&["spec.name"], "alp", true) && holds(&["spec.name"], "docker.io/lib", true));
        assert!(!holds(&["spec.name"], "pine", true) && !holds(&["spec.name"], "alp", false));
        assert!(!holds(&["location.worker_id", "spec", "state.more"], "", true));
    }
}
