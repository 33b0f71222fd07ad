//! `gantry list images` and `gantry show image`.

use anyhow::Context;
use rpc::pb::artifacts::{ResourceCache, Sharing};
use serde_json::{Value, json};

use crate::client::connect::Connection;
use crate::client::images::{self, familiar, split};
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

/// Executes `gantry show image`. `named` is a name of the image ([`images::find`]).
pub(super) async fn show(connection: &Connection, ui: &Ui, named: &str, as_json: bool) -> anyhow::Result<()> {
    let image = images::find(connection, named).await??.remove(0);
    one(&read(connection, ui, image).await?, as_json, ShownImage::json, ShownImage::fields)
}

/// Returns the JSON document of an image for `gantry inspect`.
pub(super) async fn inspected(
    connection: &Connection,
    ui: &Ui,
    image: ResourceCache,
) -> anyhow::Result<Value> {
    Ok(read(connection, ui, image).await?.json())
}

/// Reads the size of an image, and its defaults.
async fn read(connection: &Connection, ui: &Ui, image: ResourceCache) -> anyhow::Result<ShownImage> {
    if image.artifact_id.is_empty() {
        return Ok(ShownImage { image, size_bytes: None, metadata: Value::Null });
    }
    let artifact =
        queries::artifact(connection, &image.artifact_id).await.context("cannot show the image")?;
    let id = image.artifact_id.parse().context("the store named an invalid artifact id")?;
    // Its worker may be away, and an image needs no defaults.
    let metadata = read_file(connection, id, METADATA, MAX_METADATA_BYTES).await;
    let metadata = metadata.and_then(|text| Ok(serde_json::from_slice(&text)?)).unwrap_or_else(|error| {
        ui.warn(&format!("cannot read the defaults of the image: {}", describe(&error)));
        Value::Null
    });
    Ok(ShownImage { image, size_bytes: Some(artifact.size_bytes), metadata })
}

/// Image with all that `gantry show image` prints.
pub(super) struct ShownImage {
    pub(super) image: ResourceCache,
    pub(super) size_bytes: Option<u64>,
    /// Defaults for processes. `null`: they are not known.
    pub(super) metadata: Value,
}

impl ShownImage {
    pub(super) fn json(&self) -> Value {
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

fn row(image: &ResourceCache) -> Vec<String> {
    let (name, digest) = split(image);
    vec![
        plain(familiar(name), 255),
        digest.trim_start_matches("sha256:").chars().take(12).collect(),
        image.params.clone(),
        labels::ago(image.last_used_at.as_ref()),
        if image.artifact_id.is_empty() { "being pulled".to_owned() } else { image.artifact_id.clone() },
    ]
}

pub(super) fn json(image: &ResourceCache) -> Value {
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
    fn row_has_name_as_people_write_it() {
        let version = format!("docker.io/library/alpine:3.20@sha256:{}", "ab".repeat(32));
        let image = ResourceCache { version, ..ResourceCache::default() };
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
