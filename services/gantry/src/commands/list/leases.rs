//! `gantry list leases`: slots of workers that are in use or reserved.

use rpc::pb::scheduler::{Lease, ListLeasesRequest};

use crate::client::connect::{Connection, Service};
use crate::client::queries::pages;
use crate::render::listing::Listing;
use crate::render::table::plain;
use crate::render::{json, labels};

/// Executes `gantry list leases`. Lists the unfinished leases of all teams, on one worker or on
/// all.
pub(crate) async fn list(
    connection: &Connection,
    worker: Option<&str>,
    listing: Listing,
) -> anyhow::Result<()> {
    let leases = pages(async |page_token| {
        let worker = worker.unwrap_or_default().to_owned();
        let request = ListLeasesRequest { worker, page_token, ..ListLeasesRequest::default() };
        let placements = connection.placements();
        let page = connection.repeat(Service::Scheduler, "cannot list leases", async || {
            placements.clone().list_leases(request.clone()).await
        });
        page.await.map(|page| (page.leases, page.next_page_token))
    });
    listing.print(leases, json::lease, LEASES, row).await
}

const LEASES: &[&str] = &["ID", "KIND", "STATE", "TEAM", "FOR", "WORKER", "AGE", "RESERVES"];

fn row(lease: &Lease) -> Vec<String> {
    vec![
        lease.lease_id.clone(),
        labels::lease_kind(lease.kind()),
        labels::lease_state(lease.state()),
        lease.team.clone(),
        match lease.workload_id.as_str() {
            "" => plain(&lease.owner, 60),
            workload => format!("workload {workload}"),
        },
        plain(&lease.worker_name, 40),
        labels::ago(lease.granted_at.as_ref()),
        lease.requests.as_ref().map(labels::amounts).unwrap_or_default(),
    ]
}
