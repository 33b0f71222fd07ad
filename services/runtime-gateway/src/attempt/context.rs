//! The state that all attempts of one worker share.

use std::sync::Arc;

use super::image::ImageDefaults;
use crate::transfer::Transfers;
use crate::worker::Worker;
use crate::worker::attached_callers::Attendance;
use crate::worker::base_types::BaseTypeImports;

/// The worker, and the features that attempts on it use.
pub(crate) struct AttemptContext {
    pub(crate) worker: Arc<Worker>,
    pub(crate) transfers: Arc<Transfers>,
    /// Whether callers are attached to processes that may wait for one.
    pub(crate) attendance: Arc<Attendance>,
    pub(crate) imports: Arc<BaseTypeImports>,
    /// Metadata of the images that were used here.
    pub(crate) images: ImageDefaults,
}
