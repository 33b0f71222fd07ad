//! `gantry list images` and `gantry show image`.

use anyhow::{Context, bail};
use futures::TryStreamExt;
use rpc::pb::artifacts::{ResourceCache, Sharing};
use serde_json::{Value, json};

use crate::client::connect::Connection;
use crate::client::queries;
use crate::ending::error::describe;
use crate::render::labels;
use crate::render::listing::{Listing, one};
use crate::render::table::{bytes, plain};
use crate::render::ui::Ui;
use crate::transfer::download::read_file;

/// The file in an image with the defaults for its processes.
const METADATA: &str = "metadata.json";
/// Most bytes of that file.
const MAX_METADATA_BYTES: u64 = 1 << 20;
/// The defaults of an image, with their names for people.
const DEFAULTS: [(&str, &str); 7] = [
    ("entrypoint", "entrypoint"),
    ("cmd", "command"),
    ("user", "user"),
    ("workdir", "directory"),
    ("stop_signal", "stop signal"),
    ("env", "environment"),
    ("labels", "label"),
];
const HEADERS: &[&str] = &["IMAGE", "DIGEST", "PLATFORM", "LAST USED", "ARTIFACT"];

/// Executes `gantry list images`.
pub(super) async fn list(connection: &Connection, listing: Listing) -> anyhow::Result<()> {
    listing.print(queries::images(connection), json, HEADERS, row).await
}

/// Executes `gantry show image`. `named` is a reference without its digest, a digest or the start
/// of one, or the id of the cache or the artifact.
pub(super) async fn show(connection: &Connection, ui: &Ui, named: &str, as_json: bool) -> anyhow::Result<()> {
    let full = images::parse_reference(named, images::DEFAULT_REGISTRY).map(|it| it.to_string()).ok();
    let mut found: Vec<_> = queries::images(connection)
        .try_filter(|image| std::future::ready(is_named(image, named, full.as_deref())))
        .try_collect()
        .await?;
    found.sort_by_key(|image| image.last_used_at.map(|at| (at.seconds, at.nanos)));
    let Some(image) = found.pop() else {
        bail!(
            "there is no image {named:?} in the cluster; see `gantry list images`, or pull it with `gantry pull`"
        );
    };
    let shown = match image.artifact_id.as_str() {
        "" => ShownImage { image, size_bytes: None, metadata: Value::Null },
        id => {
            let artifact = queries::artifact(connection, id).await.context("cannot show the image")?;
            let id = id.parse().context("the store named an invalid artifact id")?;
            // Its worker may be away, and an image needs no defaults.
            let metadata = read_file(connection, id, METADATA, MAX_METADATA_BYTES).await;
            let metadata =
                metadata.and_then(|text| Ok(serde_json::from_slice(&text)?)).unwrap_or_else(|error| {
                    ui.warn(&format!("cannot read the defaults of the image: {}", describe(&error)));
                    Value::Null
                });
            ShownImage { image, size_bytes: Some(artifact.size_bytes), metadata }
        }
    };
    one(&shown, as_json, ShownImage::json, ShownImage::fields)
}

/// Image with all that `gantry show image` prints.
struct ShownImage {
    image: ResourceCache,
    size_bytes: Option<u64>,
    /// Defaults for processes. `null`: they are not known.
    metadata: Value,
}

impl ShownImage {
    fn json(&self) -> Value {
        let mut shown = json(&self.image);
        shown["size_bytes"] = self.size_bytes.into();
        shown["defaults"] = self.metadata.clone();
        shown
    }

    fn fields(&self) -> Vec<(&'static str, String)> {
        let image = &self.image;
        let (name, digest) = split(image);
        let visible =
            if image.sharing() == Sharing::AllTeams { "all teams".to_owned() } else { image.team.clone() };
        let mut fields = vec![
            ("image", plain(name, 255)),
            ("digest", digest.to_owned()),
            ("platform", image.params.clone()),
            ("visible to", visible),
            ("last used", labels::ago(image.last_used_at.as_ref())),
            ("artifact", image.artifact_id.clone()),
        ];
        fields.extend(self.size_bytes.map(|size| ("size", bytes(size))));
        for (key, name) in DEFAULTS {
            let texts = match &self.metadata[key] {
                Value::Array(items) if name == "environment" => items.iter().map(text).collect(),
                Value::Array(words) => vec![words.iter().map(text).collect::<Vec<_>>().join(" ")],
                Value::Object(labels) => {
                    labels.iter().map(|(label, value)| format!("{label}={}", text(value))).collect()
                }
                value => vec![text(value)],
            };
            let texts = texts.into_iter().filter(|text| !text.is_empty());
            fields.extend(texts.map(|text| (name, plain(&text, 400))));
        }
        fields
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// Whether an image has a name. `full` is the complete reference of the name.
fn is_named(image: &ResourceCache, named: &str, full: Option<&str>) -> bool {
    let (reference, digest) = split(image);
    [image.cache_id.as_str(), &image.artifact_id, &image.version, reference].contains(&named)
        || full == Some(reference)
        || full == Some(image.version.as_str())
        || named.len() >= 6
            && digest.trim_start_matches("sha256:").starts_with(named.trim_start_matches("sha256:"))
}

/// Splits the reference of an image into its name and its digest.
fn split(image: &ResourceCache) -> (&str, &str) {
    image.version.split_once('@').unwrap_or((&image.version, ""))
}

/// Returns a name as people write it.
fn familiar(name: &str) -> &str {
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    name.strip_prefix("library/").unwrap_or(name)
}

fn row(image: &ResourceCache) -> Vec<String> {
    let (name, digest) = split(image);
    vec![
        plain(familiar(name), 60),
        digest.trim_start_matches("sha256:").chars().take(12).collect(),
        image.params.clone(),
        labels::ago(image.last_used_at.as_ref()),
        if image.artifact_id.is_empty() { "being pulled".to_owned() } else { image.artifact_id.clone() },
    ]
}

fn json(image: &ResourceCache) -> Value {
    let (name, digest) = split(image);
    json!({
        "image": name,
        "digest": digest,
        "platform": image.params,
        "shared": image.sharing() == Sharing::AllTeams,
        "team": image.team,
        "cache_id": image.cache_id,
        "artifact_id": Some(&image.artifact_id).filter(|id| !id.is_empty()),
        "last_used_at": image.last_used_at.as_ref().map(labels::instant),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_found_by_each_of_its_names() {
        let digest = format!("sha256:{}", "ab".repeat(32));
        let image = ResourceCache {
            cache_id: "c".to_owned(),
            artifact_id: "a".to_owned(),
            version: format!("docker.io/library/alpine:3.20@{digest}"),
            ..ResourceCache::default()
        };
        let is = |named: &str| {
            let full = images::parse_reference(named, images::DEFAULT_REGISTRY).map(|it| it.to_string()).ok();
            is_named(&image, named, full.as_deref())
        };
        for named in
            ["alpine:3.20", "docker.io/library/alpine:3.20", "c", "a", &digest, "ababab", "sha256:ababab"]
        {
            assert!(is(named), "{named}");
        }
        for named in ["alpine", "alpine:3.2", "ababac", "ab", "b"] {
            assert!(!is(named), "{named}");
        }
        assert_eq!(row(&image)[..2], ["alpine:3.20", "abababababab"]);
    }

    #[test]
    fn defaults_of_image_are_fields() {
        let metadata = json!({
            "entrypoint": ["/bin/sh", "-c"], "cmd": ["echo it's"], "user": "", "stop_signal": "SIGINT",
            "env": ["A=1", "B=2"], "labels": {"org.example": "x"},
        });
        let shown = ShownImage { image: ResourceCache::default(), size_bytes: Some(1024), metadata };
        let fields: Vec<_> =
            shown.fields().into_iter().map(|(name, text)| format!("{name} {text}")).collect();
        assert_eq!(
            fields[6..],
            [
                "size 1.0 KiB",
                "entrypoint /bin/sh -c",
                "command echo it's",
                "stop signal SIGINT",
                "environment A=1",
                "environment B=2",
                "label org.example=x"
            ]
        );
    }
}
