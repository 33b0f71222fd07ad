//! References of images in registries.

use oci_client::Reference;

use crate::ImageError;

/// The registry of references that name none.
pub const DEFAULT_REGISTRY: &str = "docker.io";

/// Parses a reference, such as `alpine:3.20` or `ghcr.io/team/app@sha256:…`.
///
/// A reference without a registry belongs to `default_registry`. As in other tools, the first
/// component is a registry if it contains a dot or a colon, or is `localhost`. A reference without
/// a tag and a digest has the tag `latest`.
///
/// # Errors
///
/// Fails if the text is not a reference.
pub fn parse_reference(text: &str, default_registry: &str) -> Result<Reference, ImageError> {
    let invalid = |cause: String| ImageError::Reference { text: text.to_owned(), cause };
    if text.starts_with('-') || text.contains(char::is_whitespace) {
        return Err(invalid("a name contains no spaces and starts with a letter or a digit".to_owned()));
    }
    let names_registry = text
        .split_once('/')
        .is_some_and(|(first, _)| first.contains('.') || first.contains(':') || first == "localhost");
    let full = match names_registry || default_registry == DEFAULT_REGISTRY {
        true => text.to_owned(),
        false => format!("{default_registry}/{text}"),
    };
    let reference = Reference::try_from(full.as_str()).map_err(|error| {
        let upper = text.chars().any(char::is_uppercase);
        invalid(if upper { "names are in lower case".to_owned() } else { error.to_string() })
    })?;
    if reference.digest().is_some_and(|digest| !digest.starts_with("sha256:")) {
        return Err(invalid("only digests of the kind sha256 are supported".to_owned()));
    }
    Ok(reference)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_without_registry_belongs_to_default_registry() {
        let digest = format!("sha256:{}", "a".repeat(64));
        for (text, default, expected) in [
            ("alpine", "docker.io", "docker.io/library/alpine:latest"),
            ("alpine:3.20", "registry.example", "registry.example/alpine:3.20"),
            ("team/app", "registry.example:5000", "registry.example:5000/team/app:latest"),
            ("localhost/app", "registry.example", "localhost/app:latest"),
            ("ghcr.io/team/app:1", "registry.example", "ghcr.io/team/app:1"),
            (&format!("app@{digest}"), "registry.example", &format!("registry.example/app@{digest}")),
        ] {
            assert_eq!(parse_reference(text, default).unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn other_texts_are_rejected() {
        let sha512 = format!("app@sha512:{}", "a".repeat(128));
        for text in ["", "-x", "a b", "Alpine", "app:", "app@sha256:12", "/app", &sha512] {
            let error = parse_reference(text, DEFAULT_REGISTRY).unwrap_err().to_string();
            assert!(error.contains("is not an image reference: "), "{error}");
        }
    }
}
