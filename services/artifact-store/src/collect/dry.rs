//! What a round would mark: worked out by reading alone, so that whoever asks holds up nobody, however much there is.
//!
//! The rules that judge are those of a round ([`crate::rules`], [`crate::mark`]), and so are the facts ([`crate::facts`]). What a step of a round
//! would write for a later one to read is remembered here instead, as what would have gone by then. No step ends before nothing more follows from
//! what goes, so something may be told that a round leaves to the next one, a minute later.
//!
//! There is no transaction: each statement sees what was committed before it.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use domain::Timestamp;
use sea_orm::sea_query::{Expr, Values};
use sea_orm::{DatabaseConnection, DbErr, EntityTrait, FromQueryResult, QueryFilter, Statement, Value};
use uuid::Uuid;

use super::attempts::{self, Container};
use super::{Collected, Kind, LATER, Settings};
use crate::caches::task;
use crate::entity::{ArtifactState, build, owner, resource_cache, task_cache};
use crate::facts::{self, Gone, JudgedArtifact, JudgedVolume};
use crate::mark::{self, Belongs, ContainerFacts, Verdict, VolumeFacts};
use crate::rules::LetsGo;
use crate::units::size;
use crate::{ids, marks};

/// How many rows are judged at a time.
const PAGE: usize = 1000;

/// Of how many builds or attempts it is read at a time what is theirs.
const OWNERS: usize = 100;

/// How many artifacts of builds are read at a time: which builds own is in no order by which the next are found.
const MOST_OWNED: i64 = 10 * PAGE as i64;

/// How far it was read what is due.
struct Read {
    /// Up to this instant.
    at: i64,
    /// What was read that is due just then.
    at_once: HashSet<Uuid>,
    /// How many rows are read at a time.
    most: i64,
}

impl Default for Read {
    fn default() -> Self {
        Self { at: i64::MIN, at_once: HashSet::new(), most: PAGE as i64 }
    }
}

/// What [`super::full_round`] would mark, at least the first `most`.
pub(crate) async fn round(
    conn: &DatabaseConnection,
    settings: &Settings,
    most: usize,
) -> Result<Vec<Collected>, DbErr> {
    let mut dry = Dry {
        conn,
        settings,
        most,
        collected: Vec::new(),
        gone: Gone::default(),
        judged: HashSet::new(),
        deleted: HashSet::new(),
        containers: HashSet::new(),
        emptied: HashSet::new(),
        held_up: Vec::new(),
        let_go: HashSet::new(),
    };
    dry.builds().await?;
    dry.resource_caches().await?;
    dry.task_caches().await?;
    dry.attempts().await?;
    dry.claims().await?;
    dry.volumes_again();

    dry.artifacts_of_builds().await?;
    for table in ["artifacts", "tombstones"] {
        let mut read = Read::default();
        while !dry.is_enough() {
            let due = dry.due(table, "artifact_id", &mut read).await?;
            if due.is_empty() {
                break;
            }
            dry.artifacts(&due).await?;
        }
    }
    dry.volumes_again();
    while !dry.let_go.is_empty() && !dry.is_enough() {
        let artifacts: Vec<_> = dry.let_go.drain().collect();
        artifacts.iter().for_each(|artifact| _ = dry.judged.remove(artifact));
        dry.artifacts(&artifacts).await?;
        dry.volumes_again();
    }
    Ok(dry.collected)
}

struct Dry<'a> {
    conn: &'a DatabaseConnection,
    settings: &'a Settings,
    most: usize,
    collected: Vec<Collected>,
    /// What would hold nothing any more.
    gone: Gone,
    /// Artifacts that were judged, and from which nothing was taken since.
    judged: HashSet<Uuid>,
    /// Artifacts that would be marked.
    deleted: HashSet<Uuid>,
    /// Containers that would be marked.
    containers: HashSet<Uuid>,
    /// Attempts that would have no container left.
    emptied: HashSet<Uuid>,
    /// Volumes that only their children keep.
    held_up: Vec<HeldUp>,
    /// Artifacts that are to be judged.
    let_go: HashSet<Uuid>,
}

/// A volume, and what is made from it.
struct HeldUp {
    row: JudgedVolume,
    facts: VolumeFacts,
    children: Vec<Uuid>,
}

impl Dry<'_> {
    fn is_enough(&self) -> bool {
        self.collected.len() >= self.most
    }

    /// A statement with a value of ids, which it has as `IDS`.
    fn of_ids(&self, sql: &str, ids: &[Uuid]) -> Statement {
        let backend = self.conn.get_database_backend();
        let sql = sql.replace("IDS", &ids::query(backend, 1));
        Statement::from_sql_and_values(backend, sql, [ids::value(backend, ids.iter().copied())])
    }

    /// The same, with more values from `$2` on.
    fn of_ids_and<const N: usize>(&self, sql: &str, ids: &[Uuid], rest: [Value; N]) -> Statement {
        let mut statement = self.of_ids(sql, ids);
        statement.values.get_or_insert_with(|| Values(Vec::new())).0.extend(rest);
        statement
    }

    /// The condition that a column is one of these ids.
    fn among(&self, column: &str, page: &[Uuid]) -> Expr {
        ids::among(self.conn.get_database_backend(), column, page.iter().copied())
    }

    /// Some of what is due, or would be once [`super::full_round`] has made it due: the next behind what was answered before. Empty: there is no more.
    ///
    /// Read from an instant on and not up to one, as PostgreSQL sees by itself that an index has that in its order.
    async fn due(&self, table: &str, id: &str, read: &mut Read) -> Result<Vec<Uuid>, DbErr> {
        #[derive(FromQueryResult)]
        struct Due {
            at: i64,
            id: Uuid,
        }

        let until = (self.settings.now + LATER).0;
        let sql = format!(
            "SELECT look_at AS at, {id} AS id FROM {table} WHERE look_at >= $1 ORDER BY look_at LIMIT $2"
        );
        loop {
            let values: [Value; 2] = [read.at.into(), read.most.into()];
            let rows = Statement::from_sql_and_values(self.conn.get_database_backend(), &sql, values);
            let rows = Due::find_by_statement(rows).all(self.conn).await?;
            let Some(last) = rows.last().map(|row| row.at) else { return Ok(Vec::new()) };
            let is_more =
                i64::try_from(rows.len()).is_ok_and(|read_now| read_now == read.most) && last <= until;
            let due = rows.iter().filter(|row| row.at <= until && !read.at_once.contains(&row.id));
            let due: Vec<_> = due.map(|row| row.id).collect();
            if due.is_empty() && is_more {
                // More are due at one instant.
                read.most *= 2;
                continue;
            }
            if last > read.at {
                read.at = last;
                read.at_once.clear();
            }
            read.at_once.extend(rows.iter().filter(|row| row.at == last).map(|row| row.id));
            return Ok(due);
        }
    }

    /// Builds that let go, or whose term is over.
    async fn builds(&mut self) -> Result<(), DbErr> {
        let mut read = Read::default();
        loop {
            let due = self.due("builds", "build_id", &mut read).await?;
            if due.is_empty() {
                return Ok(());
            }
            for page in due.chunks(PAGE) {
                let rows = build::Entity::find().filter(self.among("build_id", page));
                let rows = rows.all(self.conn).await?;
                let let_go = rows.iter().filter(|row| lets_go(row, self.settings.now));
                self.gone.builds.extend(let_go.map(|row| row.build_id));
            }
        }
    }

    async fn resource_caches(&mut self) -> Result<(), DbErr> {
        let mut read = Read::default();
        loop {
            let due = self.due("resource_caches", "cache_id", &mut read).await?;
            if due.is_empty() {
                return Ok(());
            }
            for page in due.chunks(PAGE) {
                let uses = facts::uses(self.conn, page, self.settings.now).await?;
                let rows = resource_cache::Entity::find().filter(self.among("cache_id", page));
                for row in rows.all(self.conn).await? {
                    let uses = uses.get(&row.cache_id).copied().unwrap_or_default();
                    let lets_go = row.standing(uses).lets_go(self.settings.resource_cache_ttl);
                    self.cache(row.cache_id, row.artifact_id, lets_go);
                }
            }
        }
    }

    async fn task_caches(&mut self) -> Result<(), DbErr> {
        let mut read = Read::default();
        loop {
            let due = self.due("task_caches", "cache_id", &mut read).await?;
            if due.is_empty() {
                return Ok(());
            }
            for page in due.chunks(PAGE) {
                let in_use = task::in_use(self.conn, page).await?;
                let rows = task_cache::Entity::find().filter(self.among("cache_id", page));
                for row in rows.all(self.conn).await? {
                    let lets_go = row.lets_go(in_use.contains(&row.cache_id));
                    self.cache(row.cache_id, row.artifact_id, lets_go);
                }
            }
        }
    }

    fn cache(&mut self, cache: Uuid, owned: Option<Uuid>, lets_go: LetsGo) {
        if matches!(lets_go, LetsGo::At(at) if at <= self.settings.now) {
            self.gone.caches.insert(cache);
            self.let_go.extend(owned);
        }
    }

    /// Attempts that ended: their containers, their volumes.
    async fn attempts(&mut self) -> Result<(), DbErr> {
        let mut read = Read::default();
        while !self.is_enough() {
            let page = self.due("attempts", "attempt_id", &mut read).await?;
            if page.is_empty() {
                break;
            }
            for some in page.chunks(OWNERS) {
                self.containers(some).await?;
                self.volumes_of(some).await?;
            }
        }
        Ok(())
    }

    /// Volumes of attempts, however many each has: the youngest first, as children are younger than their parents.
    async fn volumes_of(&mut self, attempts: &[Uuid]) -> Result<(), DbErr> {
        let sql = format!(
            "SELECT {} {} AND handle < $2 ORDER BY handle DESC LIMIT $3",
            JudgedVolume::COLUMNS,
            attempts::VOLUMES_OF
        );
        let mut before = Uuid::max();
        loop {
            let rest: [Value; 2] = [before.into(), (PAGE as i64).into()];
            let volumes = self.of_ids_and(&sql, attempts, rest);
            let volumes = JudgedVolume::find_by_statement(volumes).all(self.conn).await?;
            let Some(last) = volumes.last() else { return Ok(()) };
            before = last.handle;
            self.volumes(volumes).await?;
        }
    }

    async fn containers(&mut self, attempts: &[Uuid]) -> Result<(), DbErr> {
        let sql = format!("SELECT handle, attempt_id, touched_at {}", attempts::CONTAINERS_OF);
        let rows = Container::find_by_statement(self.of_ids(&sql, attempts)).all(self.conn).await?;
        let ended = facts::ended_attempts(self.conn, attempts.iter().copied()).await?;
        let (mut emptied, mut kept) = (HashSet::new(), HashSet::new());
        for row in rows {
            let facts = ContainerFacts {
                attempt_ended_at: ended.get(&row.attempt_id).copied(),
                touched_at: row.touched_at.map(Timestamp),
            };
            match mark::container(&facts, self.settings.now, &self.settings.policy) {
                Verdict::Mark(why) => {
                    // One whose attempt was given another look meanwhile is read once more.
                    if self.containers.insert(row.handle) {
                        let (kind, id) = (Kind::Container, row.handle);
                        self.collected.push(Collected { kind, id, why, size_bytes: 0 });
                    }
                    emptied.insert(row.attempt_id);
                }
                Verdict::Keep(_) => _ = kept.insert(row.attempt_id),
            }
        }
        self.emptied.extend(emptied.difference(&kept));
        Ok(())
    }

    /// Volumes of transfers whose claims ran out.
    async fn claims(&mut self) -> Result<(), DbErr> {
        #[derive(FromQueryResult)]
        struct Claimed {
            handle: Uuid,
            at: i64,
        }

        let sql = "SELECT handle, claimed_until AS at FROM volumes
                   WHERE claimed_until <= $1 AND complete = FALSE AND given_up = FALSE AND state NOT IN ('destroying', 'sweeping')
                     AND (claimed_until, handle) > ($2, $3) ORDER BY claimed_until, handle LIMIT $4";
        let mut after = (i64::MIN, Uuid::nil());
        loop {
            let values: [Value; 4] =
                [self.settings.now.0.into(), after.0.into(), after.1.into(), (PAGE as i64).into()];
            let due = Statement::from_sql_and_values(self.conn.get_database_backend(), sql, values);
            let due = Claimed::find_by_statement(due).all(self.conn).await?;
            let Some(last) = due.last() else { return Ok(()) };
            after = (last.at, last.handle);
            let page: Vec<_> = due.into_iter().map(|row| row.handle).collect();
            let sql = format!(
                "SELECT {} FROM volumes WHERE handle IN (IDS) AND complete = FALSE
                     AND state NOT IN ('destroying', 'sweeping')",
                JudgedVolume::COLUMNS
            );
            let volumes = JudgedVolume::find_by_statement(self.of_ids(&sql, &page)).all(self.conn).await?;
            self.volumes(volumes).await?;
            if self.is_enough() {
                return Ok(());
            }
        }
    }

    /// Artifacts of builds that let go.
    async fn artifacts_of_builds(&mut self) -> Result<(), DbErr> {
        let builds: Vec<_> = self.gone.builds.iter().copied().collect();
        for some in builds.chunks(OWNERS) {
            let mut after = (Uuid::nil(), Uuid::nil());
            while !self.is_enough() {
                let sql = "SELECT build_id, artifact_id FROM owners
                           WHERE build_id IN (IDS) AND (build_id, artifact_id) > ($2, $3) ORDER BY build_id, artifact_id LIMIT $4";
                let rest: [Value; 3] = [after.0.into(), after.1.into(), MOST_OWNED.into()];
                let owned =
                    owner::Model::find_by_statement(self.of_ids_and(sql, some, rest)).all(self.conn).await?;
                let Some(last) = owned.last() else { break };
                after = (last.build_id, last.artifact_id);
                let owned: Vec<_> = owned.into_iter().map(|row| row.artifact_id).collect();
                self.artifacts(&owned).await?;
            }
        }
        Ok(())
    }

    /// Artifacts that nothing may keep any more, with their replicas; of those that are deleted, replicas that are left.
    async fn artifacts(&mut self, artifacts: &[Uuid]) -> Result<(), DbErr> {
        let artifacts = artifacts.iter().copied().filter(|artifact| self.judged.insert(*artifact));
        let artifacts: Vec<_> = artifacts.collect();
        for page in artifacts.chunks(PAGE) {
            if self.is_enough() {
                break;
            }
            let sql = format!("SELECT {} FROM artifacts WHERE artifact_id IN (IDS)", JudgedArtifact::COLUMNS);
            let rows = JudgedArtifact::find_by_statement(self.of_ids(&sql, page)).all(self.conn).await?;
            let (deleted, live): (Vec<_>, Vec<_>) =
                rows.into_iter().partition(|row| row.state == ArtifactState::Deleting);
            let facts = facts::artifacts_without(self.conn, &live, self.settings.now, &self.gone).await?;
            let mut marked: Vec<_> = deleted.iter().map(|row| row.artifact_id).collect();
            for (row, facts) in live.iter().zip(&facts) {
                let (id, size_bytes) = (row.artifact_id, size(row.size_bytes));
                if let Verdict::Mark(why) = mark::artifact(facts, self.settings.now, &self.settings.policy)
                    && self.deleted.insert(id)
                {
                    self.collected.push(Collected { kind: Kind::Artifact, id, why, size_bytes });
                    marked.push(id);
                }
            }
            let sql = format!(
                "SELECT {} FROM volumes v WHERE v.artifact_id IN (IDS) AND v.purpose = 'replica' AND {}",
                JudgedVolume::COLUMNS,
                marks::without("v"),
            );
            let replicas = JudgedVolume::find_by_statement(self.of_ids(&sql, &marked)).all(self.conn).await?;
            self.volumes(replicas).await?;
        }
        Ok(())
    }

    async fn volumes(&mut self, mut rows: Vec<JudgedVolume>) -> Result<(), DbErr> {
        // Children are younger than their parents.
        rows.sort_unstable_by_key(|row| Reverse(row.handle));
        let facts = facts::volumes(self.conn, &rows).await?;
        let parents = rows.iter().zip(&facts).filter(|(_, facts)| facts.has_live_child);
        let parents: Vec<_> = parents.map(|(row, _)| row.handle).collect();
        let mut children = self.children(&parents).await?;
        for (row, facts) in rows.into_iter().zip(facts) {
            let children = children.remove(&row.handle).unwrap_or_default();
            self.volume(HeldUp { row, facts, children });
        }
        Ok(())
    }

    /// What is made from volumes and is no garbage.
    async fn children(&self, parents: &[Uuid]) -> Result<HashMap<Uuid, Vec<Uuid>>, DbErr> {
        #[derive(FromQueryResult)]
        struct Child {
            handle: Uuid,
            parent: Uuid,
        }

        let mut children: HashMap<_, Vec<_>> = HashMap::new();
        if parents.is_empty() {
            return Ok(children);
        }
        let sql = format!(
            "SELECT c.handle, c.parent FROM volumes c WHERE c.parent IN (IDS) AND {}",
            marks::without("c")
        );
        for row in Child::find_by_statement(self.of_ids(&sql, parents)).all(self.conn).await? {
            children.entry(row.parent).or_default().push(row.handle);
        }
        Ok(children)
    }

    /// Judges the volumes that only children keep, until nothing more goes.
    fn volumes_again(&mut self) {
        loop {
            let before = self.collected.len();
            for volume in std::mem::take(&mut self.held_up) {
                self.volume(volume);
            }
            if self.collected.len() == before {
                return;
            }
        }
    }

    fn volume(&mut self, volume: HeldUp) {
        let HeldUp { row, mut facts, children } = volume;
        if self.gone.volumes.contains(&row.handle) {
            return;
        }
        facts.has_live_child = children.iter().any(|child| !self.gone.volumes.contains(child));
        match &mut facts.belongs {
            Belongs::ToArtifact { artifact_marked, .. } => {
                *artifact_marked |= row.artifact_id.is_some_and(|artifact| self.deleted.contains(&artifact));
            }
            Belongs::ToAttempt { has_live_container, .. } => {
                *has_live_container &= row.attempt_id.is_none_or(|attempt| !self.emptied.contains(&attempt));
            }
        }
        match mark::volume(&facts, self.settings.now, &self.settings.policy) {
            Verdict::Mark(why) => {
                let size_bytes = size(row.size_bytes);
                self.collected.push(Collected { kind: Kind::Volume, id: row.handle, why, size_bytes });
                self.gone.volumes.insert(row.handle);
                self.let_go.extend(row.from_artifact_id.into_iter().chain(row.artifact_id));
            }
            Verdict::Keep(_) if facts.has_live_child => {
                self.held_up.push(HeldUp { row, facts, children });
            }
            Verdict::Keep(_) => {}
        }
    }
}

/// Whether a build lets go, perhaps because its term is over.
fn lets_go(row: &build::Model, now: Timestamp) -> bool {
    let kept_until = match row.ended_at {
        Some(_) => row.kept_until,
        None => {
            let is_over = |ends_at: &i64| !row.bound && *ends_at <= now.0;
            row.term_ends_at.filter(is_over).map(|_| now.0.saturating_add(row.keep))
        }
    };
    kept_until.is_some_and(|until| until <= now.0)
}
