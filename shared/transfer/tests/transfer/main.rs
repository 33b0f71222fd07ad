//! Trees on real file systems, and what others may send.

mod archives;
mod archives_by_others;
mod common;
mod hostile_trees;
mod in_place;
mod manifests;
mod merging;
mod names;
mod trees;
mod writing;
