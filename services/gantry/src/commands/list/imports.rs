//! `gantry list imports`: worker-provided images and certificates, and the state of their imports.

use futures::Stream;
use rpc::pb::artifacts::{Import, ListImportsRequest};

use crate::client::connect::{Connection, Service};
use crate::client::queries::pages;
use crate::commands::list::names::Names;
use crate::render::json;
use crate::render::labels;
use crate::render::listing::Listing;
use crate::render::table::plain;

/// Executes `gantry list imports`.
pub(crate) async fn list(connection: &Connection, listing: Listing) -> anyhow::Result<()> {
    let headers = ["WORKER", "RESOURCE TYPE", "VERSION", "STATE", "PATH", "ARTIFACT", "REASON"];
    let names = Names::ask(connection, listing.is_json()).await;
    listing.print(imports(connection), json::import, &headers, |import| row(import, &names)).await
}

fn imports(connection: &Connection) -> impl Stream<Item = anyhow::Result<Import>> {
    pages(async |page_token| {
        let request = ListImportsRequest { worker_id: String::new(), page_size: 0, page_token };
        let client = connection.inventory();
        let doing = "cannot list imports";
        let page = connection.repeat(Service::ArtifactStore, doing, async || {
            client.clone().list_imports(request.clone()).await
        });
        page.await.map(|page| (page.imports, page.next_page_token))
    })
}

fn row(import: &Import, names: &Names) -> Vec<String> {
    let brought = import.provided.clone().unwrap_or_default();
    let what = if brought.resource_type.is_empty() { "(certs)" } else { &brought.resource_type };
    vec![
        names.of(&import.worker_id),
        plain(what, 40),
        plain(&brought.version, 30),
        labels::import_state(import.state()),
        plain(&brought.path, 60),
        import.artifact_id.clone(),
        plain(&import.failure_reason, 100),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_names_worker() {
        let names = Names::from([("id-1", "one")]);
        let import = Import { worker_id: "id-1".to_owned(), ..Default::default() };
        assert_eq!(row(&import, &names)[0], "one");
        let gone = Import { worker_id: "id-2".to_owned(), ..Default::default() };
        assert_eq!(row(&gone, &names)[0], "id-2");
    }
}
