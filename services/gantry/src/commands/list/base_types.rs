//! `gantry list base-types`: images of resource types, of single workers and cluster-wide.

use futures::Stream;
use rpc::pb::artifacts::{BaseResourceType, ListBaseResourceTypesRequest};

use crate::client::connect::{Connection, Service};
use crate::client::queries::pages;
use crate::commands::list::names::Names;
use crate::render::json;
use crate::render::listing::Listing;
use crate::render::table::plain;

/// Executes `gantry list base-types`.
pub(crate) async fn list(connection: &Connection, listing: Listing) -> anyhow::Result<()> {
    let headers = ["TYPE", "VERSION", "WORKER", "ARTIFACT"];
    let names = Names::ask(connection, listing.is_json()).await;
    listing.print(types(connection), json::base_type, &headers, |known| row(known, &names)).await
}

fn types(connection: &Connection) -> impl Stream<Item = anyhow::Result<BaseResourceType>> {
    pages(async |page_token| {
        let request = ListBaseResourceTypesRequest { page_token, ..Default::default() };
        let client = connection.caches();
        let doing = "cannot list base types";
        let page = connection.repeat(Service::ArtifactStore, doing, async || {
            client.clone().list_base_resource_types(request.clone()).await
        });
        page.await.map(|page| (page.types, page.next_page_token))
    })
}

fn row(known: &BaseResourceType, names: &Names) -> Vec<String> {
    let worker = match &*known.worker_id {
        "" => "(cluster-wide)".to_owned(),
        id => names.of(id),
    };
    vec![plain(&known.r#type, 40), plain(&known.version, 30), worker, known.artifact_id.clone()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_names_worker() {
        let names = Names::from([("id-1", "one")]);
        let of_worker = |id: &str| BaseResourceType { worker_id: id.to_owned(), ..Default::default() };
        assert_eq!(row(&of_worker("id-1"), &names)[2], "one");
        assert_eq!(row(&of_worker(""), &names)[2], "(cluster-wide)");
    }
}
