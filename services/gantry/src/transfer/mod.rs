//! Directories on their way to a cluster and back: what is sent, what is ignored, how a result takes its place.

pub(crate) mod directories;
pub(crate) mod download;
pub(crate) mod ignore;
mod receive;
mod send;
pub(crate) mod staging;
pub(crate) mod tree;
pub(crate) mod upload;
