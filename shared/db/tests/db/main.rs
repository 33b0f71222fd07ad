//! SQLite and PostgreSQL, as services use them.

mod cancelled;
mod full_disk;
mod plans;
mod schemas;
