//! Connections for queries, which fail at once while PostgreSQL is unreachable.

use std::ops::Deref;
use std::sync::Arc;

use async_trait::async_trait;
use sea_orm::{ConnectionTrait, DatabaseConnection, DbBackend, DbErr, ExecResult, QueryResult, Statement};

use crate::availability::Availability;

/// Connections for queries. The pool itself is for tests and for options of connections.
#[derive(Debug, Clone)]
pub struct Reads {
    pool: DatabaseConnection,
    availability: Option<Arc<Availability>>,
}

impl Reads {
    pub(crate) fn new(pool: DatabaseConnection, availability: Option<Arc<Availability>>) -> Self {
        Self { pool, availability }
    }

    pub(crate) fn into_pool(self) -> DatabaseConnection {
        self.pool
    }

    async fn watch<T>(&self, statement: impl Future<Output = Result<T, DbErr>>) -> Result<T, DbErr> {
        match &self.availability {
            Some(availability) => availability.watch(statement).await,
            None => statement.await,
        }
    }
}

impl Deref for Reads {
    type Target = DatabaseConnection;

    fn deref(&self) -> &DatabaseConnection {
        &self.pool
    }
}

#[async_trait]
impl ConnectionTrait for Reads {
    fn get_database_backend(&self) -> DbBackend {
        self.pool.get_database_backend()
    }

    async fn execute_raw(&self, statement: Statement) -> Result<ExecResult, DbErr> {
        self.watch(self.pool.execute_raw(statement)).await
    }

    async fn execute_unprepared(&self, sql: &str) -> Result<ExecResult, DbErr> {
        self.watch(self.pool.execute_unprepared(sql)).await
    }

    async fn query_one_raw(&self, statement: Statement) -> Result<Option<QueryResult>, DbErr> {
        self.watch(self.pool.query_one_raw(statement)).await
    }

    async fn query_all_raw(&self, statement: Statement) -> Result<Vec<QueryResult>, DbErr> {
        self.watch(self.pool.query_all_raw(statement)).await
    }
}
