//! `gantry list base-types` and `gantry list imports`: what workers bring along, and what it became.

use domain::ArtifactId;
use futures::Stream;
use rpc::pb::artifacts::{
    BaseResourceType, Import, ListBaseResourceTypesRequest, ListImportsRequest, PutBaseResourceTypeRequest,
};

use crate::client::connect::{Connection, repeat};
use crate::client::queries::{pages, table};
use crate::commands::list::names::Names;
use crate::render::json;
use crate::render::labels;
use crate::render::table::plain;

/// `gantry list base-types`
pub(crate) async fn list_types(connection: &Connection, limit: usize, as_json: bool) -> anyhow::Result<()> {
    let headers = ["TYPE", "VERSION", "WORKER", "ARTIFACT"];
    let names = Names::ask(connection, as_json).await;
    table(types(connection), limit, as_json, json::base_type, &headers, |known| type_row(known, &names)).await
}

fn types(connection: &Connection) -> impl Stream<Item = anyhow::Result<BaseResourceType>> {
    pages(async |page_token| {
        let request = ListBaseResourceTypesRequest { page_token, ..Default::default() };
        let client = connection.caches();
        let doing = "cannot list base types";
        let page = repeat(doing, async || client.clone().list_base_resource_types(request.clone()).await);
        page.await.map(|page| (page.types, page.next_page_token))
    })
}

fn type_row(known: &BaseResourceType, names: &Names) -> Vec<String> {
    let worker = match &*known.worker_id {
        "" => "(centre)".to_owned(),
        id => names.of(id),
    };
    vec![plain(&known.r#type, 40), plain(&known.version, 30), worker, known.artifact_id.clone()]
}

/// Makes an artifact the image of a resource type, on all workers.
pub(crate) async fn put_type(
    connection: &Connection,
    name: &str,
    version: &str,
    artifact: ArtifactId,
) -> anyhow::Result<()> {
    let request = PutBaseResourceTypeRequest {
        team: connection.team.clone(),
        r#type: name.to_owned(),
        version: version.to_owned(),
        worker_id: String::new(),
        artifact_id: artifact.to_string(),
    };
    let client = connection.caches();
    let doing = format!("cannot make {artifact} the image of the resource type {name:?}");
    repeat(&doing, async || client.clone().put_base_resource_type(request.clone()).await).await?;
    Ok(())
}

/// `gantry list imports`
pub(crate) async fn list(connection: &Connection, limit: usize, as_json: bool) -> anyhow::Result<()> {
    let headers = ["WORKER", "WHAT", "VERSION", "STATE", "PATH", "ARTIFACT", "WHY"];
    let names = Names::ask(connection, as_json).await;
    table(imports(connection), limit, as_json, json::import, &headers, |import| row(import, &names)).await
}

fn imports(connection: &Connection) -> impl Stream<Item = anyhow::Result<Import>> {
    pages(async |page_token| {
        let request = ListImportsRequest { worker_id: String::new(), page_size: 0, page_token };
        let client = connection.inventory();
        let doing = "cannot list what workers bring along";
        let page = repeat(doing, async || client.clone().list_imports(request.clone()).await);
        page.await.map(|page| (page.imports, page.next_page_token))
    })
}

fn row(import: &Import, names: &Names) -> Vec<String> {
    let brought = import.brought.clone().unwrap_or_default();
    let what = if brought.resource_type.is_empty() { "(certs)" } else { &brought.resource_type };
    vec![
        names.of(&import.worker_id),
        plain(what, 40),
        plain(&brought.version, 30),
        labels::import_state(import.state()).to_owned(),
        plain(&brought.path, 60),
        import.artifact_id.clone(),
        plain(&import.failed_why, 100),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_are_named() {
        let names = Names::from([("id-1", "one")]);
        let of_worker = |id: &str| BaseResourceType { worker_id: id.to_owned(), ..Default::default() };
        assert_eq!(type_row(&of_worker("id-1"), &names)[2], "one");
        assert_eq!(type_row(&of_worker(""), &names)[2], "(centre)");
        let import = Import { worker_id: "id-1".to_owned(), ..Default::default() };
        assert_eq!(row(&import, &names)[0], "one");
        let gone = Import { worker_id: "id-2".to_owned(), ..Default::default() };
        assert_eq!(row(&gone, &names)[0], "id-2");
    }
}
