//! Tests of databases on SQLite and PostgreSQL.

mod cancelled;
mod full_disk;
mod outage;
mod plans;
mod schemas;
