//! Tests of the store over gRPC, on both databases.

mod bad_input;
mod builds;
mod caches;
mod copies;
mod disposal;
mod dry_runs;
mod harness;
mod imports;
mod inventory;
mod lifecycles;
mod losses;
mod model;
mod orphans;
mod owners;
mod queries;
mod races;
mod reports;
mod restarts;
mod trees;
mod trust;
mod why;

pub(crate) use harness::*;
pub(crate) use testing::tables::Tables;

/// Runs each test on SQLite and on PostgreSQL.
macro_rules! on_both_databases {
    ($($(#[$attribute:meta])* $name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread")]
            $(#[$attribute])*
            async fn $name() {
                super::$name(testing::databases::sqlite()).await;
            })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread")]
            $(#[$attribute])*
            async fn $name() {
                super::$name(testing::databases::postgres().await).await;
            })+
        }
    };
}
pub(crate) use on_both_databases;
