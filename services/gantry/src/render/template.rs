//! Templates for lists, in the syntax of Jinja. `{{.field}}`, as in templates of Go, is the same as
//! `{{field}}`.

use anyhow::{Context, anyhow};
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior};
use serde_json::Value as Json;

use crate::render::table::changes_terminal;

/// A valid template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Template(String);

impl Template {
    /// Parses a template. `\t` and `\n` stand for a tab and a new line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let text = text.replace("\\t", "\t").replace("\\n", "\n");
        let text = text.replace("{{.", "{{ ").replace("{{ .", "{{ ");
        let checked = environment().template_from_str(&text).map(drop);
        checked.map(|()| Self(text)).map_err(|error| format!("the template is invalid: {}", cause(&error)))
    }

    /// Fills the template with the fields of a document. Characters that control a terminal are
    /// replaced.
    pub(crate) fn render(&self, document: &Json) -> anyhow::Result<String> {
        let text = environment().render_str(&self.0, Serde(document)).map_err(|error| {
            let fields = document.as_object().into_iter().flatten().map(|(name, _)| name.as_str());
            let fields = fields.collect::<Vec<_>>().join(", ");
            anyhow!("{}; the fields are {fields}", cause(&error))
        });
        let text = text.context("cannot fill the template of --format")?;
        let harmless = |c| if changes_terminal(c) && !matches!(c, '\n' | '\t') { '?' } else { c };
        Ok(text.chars().map(harmless).collect())
    }
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    // A misspelled field must not look like an empty one.
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment
}

fn cause(error: &minijinja::Error) -> String {
    error.detail().map_or_else(|| error.kind().to_string(), |detail| format!("{}: {detail}", error.kind()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_fill_template() {
        let document = json!({ "id": "7", "spec": { "name": "a\u{1b}[1m" }, "outputs": [{ "name": "x" }] });
        let render = |text: &str| Template::parse(text).expect(text).render(&document);
        assert_eq!(render("{{.id}}").expect("text"), "7");
        assert_eq!(render("{{ .id }}\\t{{ spec.name }}").expect("text"), "7\ta?[1m");
        assert_eq!(render("{% for it in outputs %}{{ it.name }}{% endfor %}").expect("text"), "x");
        let unknown = render("{{ nmae }}").expect_err("a field that does not exist");
        assert!(format!("{unknown:#}").ends_with("the fields are id, outputs, spec"), "{unknown:#}");
        assert!(Template::parse("{{ id").expect_err("refused").starts_with("the template is invalid"));
    }
}
