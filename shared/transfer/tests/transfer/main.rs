//! Tests with trees on real file systems, and with hostile input.

mod archives;
mod archives_by_others;
mod common;
mod hostile_trees;
mod in_place;
mod linking;
mod manifests;
mod merging;
mod names;
mod trees;
mod writing;
