//! `gantry list volumes --orphans` and `gantry list containers --orphans`.

use futures::TryStreamExt;
use rpc::pb::artifacts::Orphan;

use crate::cli::args::Kind;
use crate::client::connect::Connection;
use crate::client::queries::{orphan_handle, orphans};
use crate::commands::list::names::Names;
use crate::render::listing::Listing;
use crate::render::table::plain;
use crate::render::{json, labels};

/// Lists the orphans of one kind.
pub(crate) async fn list(connection: &Connection, kind: Kind, listing: Listing) -> anyhow::Result<()> {
    let of_kind = |one: &Orphan| one.volume_handle.is_empty() == (kind == Kind::Containers);
    let found = orphans(connection, String::new()).try_filter(move |one| std::future::ready(of_kind(one)));
    let names = Names::ask(connection, listing.is_json()).await;
    let (headers, row): (_, fn(&Orphan, &Names) -> Vec<String>) = match kind {
        Kind::Containers => (CONTAINERS, container_row),
        _ => (VOLUMES, volume_row),
    };
    listing.print(found, json::orphan, headers, |one| row(one, &names)).await
}

const CONTAINERS: &[&str] = &["HANDLE", "WORKER", "FIRST SEEN"];

fn container_row(one: &Orphan, names: &Names) -> Vec<String> {
    vec![orphan_handle(one).to_owned(), names.of(&one.worker_id), labels::ago(one.first_seen_at.as_ref())]
}

const VOLUMES: &[&str] = &["HANDLE", "WORKER", "FIRST SEEN", "SIZE", "TEAM", "ARTIFACT", "ADOPTABLE"];

fn volume_row(one: &Orphan, names: &Names) -> Vec<String> {
    let known = one.description.clone().unwrap_or_default();
    vec![
        orphan_handle(one).to_owned(),
        names.of(&one.worker_id),
        labels::ago(one.first_seen_at.as_ref()),
        labels::size(known.size_bytes),
        plain(&known.team, 30),
        known.artifact_id,
        labels::yes_or_no(!known.digest.is_empty()).to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use rpc::pb::artifacts::VolumeDescription;

    use super::*;

    #[test]
    fn row_says_whether_volume_is_adoptable() {
        let (names, worker_id) = (Names::from([("id-1", "one")]), "id-1".to_owned());
        let mut one = Orphan { container_handle: "7".to_owned(), worker_id, ..Orphan::default() };
        let row = container_row(&one, &names);
        assert_eq!((row.len(), &row[..2]), (CONTAINERS.len(), &["7".to_owned(), "one".to_owned()][..]));
        let row = volume_row(&one, &names);
        assert_eq!((row.len(), &*row[1], row.last().map(String::as_str)), (VOLUMES.len(), "one", Some("no")));
        one.volume_handle = "8".to_owned();
        let description = VolumeDescription { digest: vec![1; 32].into(), ..Default::default() };
        one.description = Some(description);
        let row = volume_row(&one, &names);
        assert_eq!((row[0].as_str(), row.last().map(String::as_str)), ("8", Some("yes")));
    }
}
