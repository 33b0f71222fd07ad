//! Lists of the store, and remaining rows of its tables.

use domain::ArtifactId;
use rpc::pb::artifacts as pb;
use sea_orm::{ConnectionTrait, DbBackend, Statement};

use super::World;
use crate::model::check::{SeenArtifact, SeenVolume, View};
use crate::{Answer, TEAM};

/// Tables that have rows even if nothing is kept.
const LASTING: [&str; 5] = ["store", "workers", "seaql_migrations", "migration_digests", "sqlite_sequence"];

impl World {
    pub(crate) async fn view(&self) -> View {
        let (artifacts, volumes, containers, (orphans, _)) =
            tokio::join!(self.artifacts(), self.volumes(""), self.containers(""), self.orphans());
        let mut view = View { orphans, ..View::default() };
        for artifact in artifacts {
            let id: ArtifactId = artifact.artifact_id.parse().expect("an id");
            let replicas = artifact.replicas.iter();
            let seen = SeenArtifact {
                state: artifact.state(),
                size_bytes: artifact.size_bytes,
                replicas: replicas.map(|replica| replica.volume_handle.parse().expect("a handle")).collect(),
                digest: artifact.digest.into(),
                kept_by: artifact.kept_by,
            };
            view.artifacts.insert(id, seen);
        }
        for volume in volumes {
            let parent = Some(&volume.parent_handle).filter(|parent| !parent.is_empty());
            let parent = parent.map(|parent| parent.parse().expect("a handle"));
            let artifact = Some(&volume.artifact_id).filter(|artifact| !artifact.is_empty());
            let artifact = artifact.map(|artifact| artifact.parse().expect("an id"));
            let seen = SeenVolume { state: volume.state(), parent, artifact };
            view.volumes.insert(volume.volume_handle.parse().expect("a handle"), seen);
        }
        for container in containers {
            let id = container.container_handle.parse().expect("a handle");
            view.containers.insert(id, container.state());
        }
        view
    }

    pub(super) async fn artifacts(&self) -> Vec<pb::Artifact> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListArtifactsRequest {
                    team: TEAM.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.artifacts().list_artifacts(request).await?.into_inner();
                    Ok((page.artifacts, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    pub(super) async fn volumes(&self, worker: &str) -> Vec<pb::Volume> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListVolumesRequest {
                    worker_id: worker.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.inventory().list_volumes(request).await?.into_inner();
                    Ok((page.volumes, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    pub(super) async fn containers(&self, worker: &str) -> Vec<pb::Container> {
        let page = |token: String| {
            self.ask(move |callers| {
                let request = pb::ListContainersRequest {
                    worker_id: worker.to_owned(),
                    page_size: 1000,
                    page_token: token.clone(),
                    ..Default::default()
                };
                async move {
                    let page = callers.inventory().list_containers(request).await?.into_inner();
                    Ok((page.containers, page.next_page_token))
                }
            })
        };
        all(page).await
    }

    /// Returns the numbers of rows in tables that must be empty if nothing is kept.
    pub(crate) async fn rows_left(&self) -> Vec<(String, i64)> {
        let database = sea_orm::Database::connect(&self.database.url).await.expect("the database answers");
        let backend = database.get_database_backend();
        let tables = match backend {
            DbBackend::Sqlite => "SELECT name FROM sqlite_master WHERE type = 'table'",
            _ => "SELECT tablename AS name FROM pg_tables WHERE schemaname = 'public'",
        };
        let mut left = Vec::new();
        let tables = database.query_all_raw(Statement::from_string(backend, tables)).await;
        for row in tables.expect("the tables") {
            let table: String = row.try_get("", "name").expect("a name");
            if LASTING.contains(&table.as_str()) {
                continue;
            }
            let count = Statement::from_string(backend, format!("SELECT COUNT(*) AS n FROM {table}"));
            let count = database.query_one_raw(count).await.expect("a count").expect("a row");
            let count: i64 = count.try_get("", "n").expect("a number");
            if count > 0 {
                left.push((table, count));
            }
        }
        database.close().await.expect("closed");
        left
    }
}

/// Returns the elements of all pages.
pub(super) async fn all<T, F>(page: impl Fn(String) -> F) -> Vec<T>
where
    F: Future<Output = Answer<(Vec<T>, String)>>,
{
    let (mut all, mut token) = (Vec::new(), String::new());
    loop {
        let (items, next) = page(token).await.expect("listed");
        all.extend(items);
        if next.is_empty() {
            return all;
        }
        token = next;
    }
}
