//! Images of a cluster by their names.
//!
//! An image is a resource cache. Its key has the digest and the platform of the image, and its
//! version is the reference of its first pull, with the digest. Later pulls by another tag find the
//! same cache, which keeps its version.

use std::collections::BTreeSet;

use domain::ArtifactId;
use futures::TryStreamExt;
use images::Reference;
use rpc::pb::artifacts::{DeleteResourceCacheRequest, ResourceCache};

use crate::client::connect::{Connection, Service};
use crate::client::queries;
use crate::client::references::{self, NoOutput};
use crate::ending::error::refusal;

/// Minimum number of digits at the beginning of a digest.
const MIN_DIGITS: usize = 6;
/// Maximum number of images in an error.
const LIST_LIMIT: usize = 10;

/// No image of the cluster has the name.
#[derive(Debug, thiserror::Error)]
#[error("the cluster has no image {named:?}; {}", self.advice("see `gantry images`, or pull it with `gantry pull`"))]
pub(crate) struct NoImage {
    named: String,
    /// Images whose repositories have the same last component, as people write them.
    similar: BTreeSet<String>,
}

impl NoImage {
    /// Returns what the reader can do: `otherwise`, unless there are images with a similar name.
    pub(crate) fn advice(&self, otherwise: &str) -> String {
        if self.similar.is_empty() {
            return otherwise.to_owned();
        }
        let listed: Vec<_> = self.similar.iter().take(LIST_LIMIT).map(String::as_str).collect();
        let more = if self.similar.len() > LIST_LIMIT { " and others" } else { "" };
        format!("the images with a similar name are {}{more}; see `gantry images`", listed.join(", "))
    }
}

/// Returns the images with a name, the one that was used last first. There is at least one.
///
/// The name is a reference, a digest or the beginning of one, or the id of the cache or the
/// artifact.
pub(crate) async fn find(
    connection: &Connection,
    named: &str,
) -> anyhow::Result<Result<Vec<ResourceCache>, NoImage>> {
    let all: Vec<_> = queries::images(connection).try_collect().await?;
    Ok(choose(all, named))
}

fn choose(mut all: Vec<ResourceCache>, named: &str) -> Result<Vec<ResourceCache>, NoImage> {
    let wanted = parse(named);
    let is_named = |image: &ResourceCache| {
        let (name, digest) = split(image);
        [image.cache_id.as_str(), &image.artifact_id, &image.version, name, digest].contains(&named)
            || wanted.as_ref().zip(parse(&image.version)).is_some_and(|(wanted, image)| {
                (wanted.registry(), wanted.repository()) == (image.registry(), image.repository())
                    && (wanted.tag() == image.tag() || wanted.tag().is_none())
                    && (wanted.digest() == image.digest() || wanted.digest().is_none())
            })
    };
    // An image that was pulled by its digest is listed without a tag.
    let is_listed_as = |image: &ResourceCache| familiar(split(image).0) == named;
    let digits = named.trim_start_matches("sha256:");
    let begins = |image: &ResourceCache| {
        digits.len() >= MIN_DIGITS && split(image).1.trim_start_matches("sha256:").starts_with(digits)
    };
    let ways: [&dyn Fn(&ResourceCache) -> bool; 3] = [&is_named, &is_listed_as, &begins];
    let Some(way) = ways.into_iter().find(|way| all.iter().any(way)) else {
        let last = |reference: Reference| reference.repository().rsplit('/').next().map(str::to_owned);
        let wanted = wanted.and_then(last);
        let is_similar =
            |image: &&ResourceCache| wanted.is_some() && parse(&image.version).and_then(last) == wanted;
        let similar = all.iter().filter(is_similar).map(|image| familiar(split(image).0).to_owned());
        return Err(NoImage { named: named.to_owned(), similar: similar.collect() });
    };
    all.retain(way);
    all.sort_by_key(|image| std::cmp::Reverse(image.last_used_at.map(|at| (at.seconds, at.nanos))));
    Ok(all)
}

fn parse(text: &str) -> Option<Reference> {
    images::parse_reference(text, images::DEFAULT_REGISTRY).ok()
}

/// Artifact or images that a reference stands for.
pub(crate) enum Content {
    Artifact(ArtifactId),
    /// At least one, the one that was used last first.
    Images(Vec<ResourceCache>),
}

/// Returns the artifact that a reference stands for, or else the images. `doing` is the verb for
/// the error text.
pub(crate) async fn content(
    connection: &Connection,
    doing: &str,
    reference: &str,
) -> anyhow::Result<Result<Content, NoImage>> {
    let artifact = references::artifact_id(connection, doing, reference).await;
    let no_output = match artifact {
        Err(error) if error.is::<NoOutput>() => Some(error),
        artifact => match references::known(artifact)? {
            Some(artifact) => return Ok(Ok(Content::Artifact(artifact))),
            None => None,
        },
    };
    match (find(connection, reference).await?, no_output) {
        (Err(_), Some(no_output)) => Err(no_output),
        (found, _) => Ok(found.map(Content::Images)),
    }
}

/// Deletes an image. Its artifact becomes garbage if nothing else keeps it.
pub(crate) async fn delete(connection: &Connection, image: &ResourceCache) -> anyhow::Result<()> {
    let (team, cache_id) = (connection.team.clone(), image.cache_id.clone());
    let request = DeleteResourceCacheRequest { team, cache_id };
    let client = connection.caches();
    let doing = format!("cannot delete image {}", familiar(split(image).0));
    let deleted = connection
        .repeat(Service::ArtifactStore, &doing, async || {
            client.clone().delete_resource_cache(request.clone()).await
        })
        .await;
    match deleted {
        // An earlier attempt of this call deleted it.
        Err(error) if refusal(&error).is_some_and(|refused| refused.is(rpc::Reason::CacheNotFound)) => Ok(()),
        deleted => deleted.map(drop),
    }
}

/// Splits the version of an image into its name and its digest.
pub(crate) fn split(image: &ResourceCache) -> (&str, &str) {
    image.version.split_once('@').unwrap_or((&image.version, ""))
}

/// Returns a name as people write it.
pub(crate) fn familiar(name: &str) -> &str {
    let name = name.strip_prefix("docker.io/").unwrap_or(name);
    name.strip_prefix("library/").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:abababababababababababababababababababababababababababababababab";

    fn image(name: &str) -> ResourceCache {
        ResourceCache {
            cache_id: format!("cache of {name}"),
            artifact_id: format!("artifact of {name}"),
            version: format!("{name}@{DIGEST}"),
            ..ResourceCache::default()
        }
    }

    #[test]
    fn image_is_found_by_each_of_its_names() {
        let names = ["docker.io/library/alpine:3.20", "localhost:5000/x:1", "docker.io/library/digested"];
        let is = |named: &str, name: &str| {
            let found = choose(names.map(image).to_vec(), named);
            found.is_ok_and(|found| found.iter().any(|found| split(found).0 == name))
        };
        let digested = |name: &str| format!("{name}@{DIGEST}");
        for (named, name) in [
            ("alpine:3.20", names[0]),
            (names[0], names[0]),
            (&digested("alpine:3.20"), names[0]),
            (&digested("alpine"), names[0]),
            ("cache of docker.io/library/alpine:3.20", names[0]),
            ("artifact of docker.io/library/alpine:3.20", names[0]),
            ("localhost:5000/x:1", names[1]),
            (&digested("localhost:5000/x"), names[1]),
            ("digested", names[2]),
            (DIGEST, names[2]),
            ("ababab", names[2]),
            ("sha256:ababab", names[2]),
        ] {
            assert!(is(named, name), "{named}");
        }
        let other = format!("alpine@{}", DIGEST.replace('a', "c"));
        for named in ["alpine", "alpine:3.2", "localhost:5000/x", "ababac", "ab", "b", &other] {
            assert!(!names.iter().any(|name| is(named, name)), "{named}");
        }
    }

    #[test]
    fn name_comes_before_beginning_of_digest() {
        let found = choose(vec![image("docker.io/library/ababab:latest"), image("x:1")], "ababab");
        assert_eq!(found.expect("an image").len(), 1);
    }

    #[test]
    fn image_that_was_used_last_comes_first() {
        let used = |seconds| ResourceCache {
            last_used_at: Some(prost_types::Timestamp { seconds, nanos: 0 }),
            ..image("docker.io/library/alpine:3.20")
        };
        let found = choose(vec![used(1), used(3), used(2)], "alpine:3.20").expect("images");
        assert_eq!(found.first(), Some(&used(3)));
    }

    #[test]
    fn error_lists_images_with_similar_names() {
        let all = vec![image("localhost:5000/team/x:1"), image("docker.io/library/alpine:3.20")];
        let refused = |named: &str| choose(all.clone(), named).expect_err("no image").to_string();
        assert_eq!(
            refused("127.0.0.1:5000/x:1"),
            "the cluster has no image \"127.0.0.1:5000/x:1\"; the images with a similar name are \
             localhost:5000/team/x:1; see `gantry images`"
        );
        for named in ["alpin", "App"] {
            assert!(refused(named).ends_with("see `gantry images`, or pull it with `gantry pull`"));
        }
    }
}
