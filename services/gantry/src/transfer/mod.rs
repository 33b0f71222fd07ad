//! Upload and download of directories: scanning, ignore files, transfer, and merging of results.

pub(crate) mod directories;
pub(crate) mod download;
pub(crate) mod evacuate;
pub(crate) mod ignore;
pub(crate) mod images;
mod receive;
mod send;
pub(crate) mod staging;
pub(crate) mod tree;
pub(crate) mod upload;
