//! The state that all attempts of one worker share.

use std::sync::Arc;

use super::image::ImageDefaults;
use crate::transfer::Transfers;
use crate::util::keyed_locks::IdLocks;
use crate::worker::Worker;
use crate::worker::attached_callers::Attendance;
use crate::worker::base_types::BaseTypeImports;

/// The worker, and the features that its attempts use.
pub(crate) struct AttemptContext {
    pub(crate) worker: Arc<Worker>,
    pub(crate) transfers: Arc<Transfers>,
    /// Callers that are attached to processes.
    pub(crate) attendance: Arc<Attendance>,
    pub(crate) imports: Arc<BaseTypeImports>,
    /// Metadata of images that were used on the worker.
    pub(crate) images: ImageDefaults,
    /// Serialize the operations of callers on one driven lease or container.
    pub(crate) admissions: IdLocks,
}
