//! Volumes of a worker.
