//! The pull of an image: its layers are fetched and applied to one another.

use std::sync::Arc;

use futures::{FutureExt, StreamExt, TryStreamExt};

use crate::{ImageError, ImageSource, ImageTree, LayerStore, Platform, Progress, assemble};

/// Layers that are fetched at the same time.
const CONCURRENT_LAYERS: usize = 3;
/// Most layers of an image.
const MAX_LAYERS: usize = 1000;

/// Fetches the layers that `store` lacks, and returns the tree of the image.
///
/// # Errors
///
/// Fails if the image cannot be fetched, is invalid or does not run on the platform, or if the
/// store cannot be written.
pub async fn pull(
    source: &ImageSource,
    platform: &Platform,
    store: &LayerStore,
    progress: &Progress,
) -> Result<ImageTree, ImageError> {
    progress.expect(source.size_bytes());
    let metadata = source.config(platform).await?;
    if source.layers().len() > MAX_LAYERS {
        let cause = format!("it has {} layers", source.layers().len());
        return Err(ImageError::invalid(source.name(), cause));
    }
    let layer = |descriptor| store.layer(source, descriptor, progress).boxed();
    let fetches: Vec<_> = source.layers().iter().map(layer).collect();
    let layers: Vec<Arc<_>> =
        futures::stream::iter(fetches).buffered(CONCURRENT_LAYERS).try_collect().await?;
    let name = source.name().to_owned();
    let assembled = tokio::task::spawn_blocking(move || assemble(&name, layers, &metadata)).await;
    assembled.map_err(|error| ImageError::invalid(source.name(), error))?
}
