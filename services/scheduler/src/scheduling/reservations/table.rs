//! The table of reservations, which each replica reads and writes with every poll.
//!
//! A row names a worker and the request for which it is reserved. A row whose worker is the request
//! itself means that the request gets no reservation for a time, after all workers were tried. A
//! row belongs to the replica that wrote it, for a [`TERM`] that this replica extends. No other
//! replica changes the row before the term ends, so the reservations of an ended replica expire.
//!
//! Invariant: a worker is reserved for one request, because the worker is the key. If two replicas
//! reserve for the same request concurrently, the one with the lower id keeps its reservation.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use db::{Database, rows};
use domain::{Timestamp, WorkerId};
use sea_orm::{ConnectionTrait, DatabaseTransaction, DbErr, Statement};
use serde::Serialize;
use uuid::Uuid;

use super::{PeerReservation, Reservations};
use crate::db::entity::reservation::Model;

/// Time for which a row counts unless its replica extends it.
const TERM: Duration = Duration::from_secs(30);

impl Reservations {
    /// Reads the reservations of other replicas. Conflicting reservations of this replica are
    /// dropped.
    pub(super) fn read(&mut self, rows: &[Model], now: Timestamp) {
        let before = std::mem::take(&mut self.others);
        for row in rows.iter().filter(|row| Timestamp(row.expires_at) > now) {
            let (worker, request) = (WorkerId::from_uuid(row.worker_id), row.request_id);
            if row.replica == self.replica {
                continue;
            }
            self.own.values_mut().for_each(|of| of.lose(worker, now));
            let stays = self.own.get(&request).is_some_and(|own| !own.workers.is_empty() || own.rests);
            if stays && self.replica < row.replica {
                continue;
            }
            self.own.remove(&request);
            let seen_here = before.get(&request).is_some_and(|other| other.seen_here);
            let new = || PeerReservation { replica: row.replica, workers: BTreeSet::new(), seen_here };
            let other = self.others.entry(request).or_insert_with(new);
            // Of two other replicas, the one with the lower id keeps its reservation.
            if row.replica < other.replica {
                *other = new();
            }
            if row.replica == other.replica && worker.uuid() != request {
                other.workers.insert(worker);
            }
        }
    }
}

/// The changes to write to the table.
#[derive(Debug)]
pub(super) struct Difference {
    replica: Uuid,
    /// Workers whose rows must be deleted.
    over: Vec<Uuid>,
    /// Rows to write, by worker.
    new: BTreeMap<WorkerId, Uuid>,
}

impl Difference {
    /// Compares the reservations of this replica with the `rows` of the table.
    pub(super) fn of(reservations: &Reservations, rows: &[Model], now: Timestamp) -> Self {
        let replica = reservations.replica;
        let own = reservations.own.iter().flat_map(|(request, of)| {
            let rests = of.rests.then(|| WorkerId::from_uuid(*request));
            of.workers.iter().copied().chain(rests).map(|worker| (worker, *request))
        });
        let mut new: BTreeMap<_, _> = own.collect();
        let mut over = Vec::new();
        for row in rows {
            let worker = WorkerId::from_uuid(row.worker_id);
            let (is_own, ends_at) = (row.replica == replica, Timestamp(row.expires_at));
            match new.get(&worker) {
                Some(request) if is_own && *request == row.request_id && ends_at > now + TERM / 2 => {
                    new.remove(&worker);
                }
                None if is_own || ends_at <= now => over.push(row.worker_id),
                _ => {}
            }
        }
        Self { replica, over, new }
    }

    pub(super) async fn write(&self, db: &Database, now: Timestamp) -> Result<(), DbErr> {
        // New rows are written first, so that no reader sees a gap. Each write has its own
        // transaction, because replicas lock rows of each other one statement at a time.
        if !self.new.is_empty() {
            db.write(async |txn| self.insert(&txn, now).await).await?;
        }
        if !self.over.is_empty() {
            db.write(async |txn| self.delete(&txn, now).await).await?;
        }
        Ok(())
    }

    async fn delete(&self, txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
        let backend = txn.get_database_backend();
        let query = format!(
            "DELETE FROM reservations WHERE worker_id {} AND (replica = $2 OR expires_at <= $3)",
            rows::among(backend, 1)
        );
        let values = [rows::ids(self.over.iter().copied())?, self.replica.into(), now.0.into()];
        txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
        Ok(())
    }

    /// Keeps rows of other replicas whose term has not ended.
    async fn insert(&self, txn: &DatabaseTransaction, now: Timestamp) -> Result<(), DbErr> {
        #[derive(Serialize)]
        struct Row {
            worker_id: Uuid,
            request_id: Uuid,
        }
        const ROW: [(&str, rows::Column); 2] =
            [("worker_id", rows::Column::Uuid), ("request_id", rows::Column::Uuid)];
        let backend = txn.get_database_backend();
        let query = format!(
            "INSERT INTO reservations (worker_id, request_id, expires_at, replica)
             SELECT worker_id, request_id, $2, $3 FROM ({}) AS chosen WHERE TRUE ORDER BY worker_id
             ON CONFLICT (worker_id) DO UPDATE
             SET request_id = excluded.request_id, expires_at = excluded.expires_at, replica = excluded.replica
             WHERE reservations.replica = excluded.replica OR reservations.expires_at <= $4",
            rows::query(backend, 1, &ROW)
        );
        let row =
            |(worker, request): (&WorkerId, &Uuid)| Row { worker_id: worker.uuid(), request_id: *request };
        let new: Vec<_> = self.new.iter().map(row).collect();
        let values = [rows::value(&new)?, (now + TERM).0.into(), self.replica.into(), now.0.into()];
        txn.execute_raw(Statement::from_sql_and_values(backend, query, values)).await?;
        Ok(())
    }
}
