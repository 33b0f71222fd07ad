//! Containers and processes of a worker.
