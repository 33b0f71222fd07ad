//! `gantry list images` and `gantry show image`.

use anyhow::{Context, bail};
use futures::{Stream, TryStreamExt};
use rpc::pb::artifacts::{Artifact, ListResourceCachesRequest, ResourceCache, Sharing};
use serde_json::{Value, json};

use crate::client::connect::{Connection, Service};
use crate::client::queries::{self, pages};
use crate::render::labels;
use crate::render::listing::{Listing, one};
use crate::render::table::{bytes, plain};

/// Type of the resource caches of images.
const TYPE: &str = "image";
const HEADERS: &[&str] = &["IMAGE", "DIGEST", "PLATFORM", "LAST USED", "ARTIFACT"];

/// Executes `gantry list images`.
pub(super) async fn list(connection: &Connection, listing: Listing) -> anyhow::Result<()> {
    listing.print(all(connection), json, HEADERS, row).await
}

/// Executes `gantry show image`. `named` is a reference without its digest, a digest or the start
/// of one, or the id of the cache or the artifact.
pub(super) async fn show(connection: &Connection, named: &str, as_json: bool) -> anyhow::Result<()> {
    let full = images::parse_reference(named, images::DEFAULT_REGISTRY).map(|it| it.to_string()).ok();
    let mut found: Vec<_> = all(connection)
        .try_filter(|image| std::future::ready(is_named(image, named, full.as_deref())))
        .try_collect()
        .await?;
    found.sort_by_key(|image| image.last_used_at.map(|at| (at.seconds, at.nanos)));
    let Some(image) = found.pop() else {
        bail!(
            "there is no image {named:?} in the cluster; see `gantry list images`, or pull it with `gantry pull`"
        );
    };
    let artifact = match image.artifact_id.as_str() {
        "" => None,
        id => Some(queries::artifact(connection, id).await.context("cannot show the bytes of the image")?),
    };
    one(&(image, artifact), as_json, |(image, artifact)| json_of(image, artifact.as_ref()), fields)
}

fn all(connection: &Connection) -> impl Stream<Item = anyhow::Result<ResourceCache>> {
    let caches = pages(async move |page_token| {
        let request = ListResourceCachesRequest { team: connection.team.clone(), page_size: 0, page_token };
        let client = connection.caches();
        let page = connection.repeat(Service::ArtifactStore, "cannot list images", async || {
            client.clone().list_resource_caches(request.clone()).await
        });
        page.await.map(|page| (page.caches, page.next_page_token))
    });
    caches.try_filter(|cache| std::future::ready(cache.r#type == TYPE))
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

fn fields((image, artifact): &(ResourceCache, Option<Artifact>)) -> Vec<(&'static str, String)> {
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
    if let Some(artifact) = artifact {
        fields.push(("size", bytes(artifact.size_bytes)));
    }
    fields
}

fn json(image: &ResourceCache) -> Value {
    json_of(image, None)
}

fn json_of(image: &ResourceCache, artifact: Option<&Artifact>) -> Value {
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
        "size_bytes": artifact.map(|artifact| artifact.size_bytes),
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
}
