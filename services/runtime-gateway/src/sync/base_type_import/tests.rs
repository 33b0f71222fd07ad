//! Imports of a fake worker, with an artifact store whose answers each test gives.

use std::path::Path;

use domain::worker::Session;
use testing::conformance;
use testing::fake::FakeWorker;

use super::*;
use crate::test_support::store::{Answer, Asked, Store, session};
use crate::test_support::{Attended, NOBODY, TestWorker, within};
use crate::worker::session::OpenSession;
use rpc::pb::artifacts as pb;
use runtime::WorkerProvided;

/// A gateway that imports what its worker brings along, and the store that it asks.
struct Suite {
    machine: Arc<FakeWorker>,
    worker: TestWorker,
    store: Store,
    session: OpenSession,
}

fn git(path: &Path) -> WorkerProvidedPath {
    let what = WorkerProvided::ResourceType("git".to_owned());
    WorkerProvidedPath { what, version: "1".to_owned(), path: path.display().to_string() }
}

impl Suite {
    async fn start(worker_provided: Vec<WorkerProvidedPath>) -> Self {
        let store = Store::start().await;
        let machine = FakeWorker::providing(worker_provided, false);
        let worker = machine.attended(NOBODY, &store.endpoint);
        let session = session("credential");
        worker.session.set(Some(session.clone()));
        worker.tasks.spawn(import_forever(worker.transfers.clone(), worker.imports.clone()));
        Self { machine, worker, store, session }
    }

    /// The next call, which prepares an import.
    async fn prepare(&mut self) -> (pb::PrepareImportRequest, Answer<pb::PrepareImportResponse>) {
        match self.store.asked().await {
            Asked::PrepareImport(request, answer) => (request, answer),
            _ => panic!("it asks for something else"),
        }
    }

    /// Has what is prepared next imported into this volume.
    async fn begin(&mut self, artifact: ArtifactId, volume: VolumeHandle) -> pb::PrepareImportRequest {
        let (request, answer) = self.prepare().await;
        answer.send(Ok(yours(artifact, volume))).expect("it waits");
        request
    }

    async fn complete(&mut self, artifact: ArtifactId) -> pb::CompleteImportRequest {
        let (request, answer) = match self.store.asked().await {
            Asked::CompleteImport(request, answer) => (request, answer),
            Asked::FailImport(request, _) => panic!("it failed: {request:?}"),
            _ => panic!("it asks for something else"),
        };
        answer.send(Ok(pb::CompleteImportResponse { artifact_id: artifact.to_string() })).expect("it waits");
        request
    }

    async fn fail(&mut self) -> pb::FailImportRequest {
        let Asked::FailImport(request, answer) = self.store.asked().await else { panic!("no failure") };
        answer.send(Ok(pb::FailImportResponse {})).expect("it waits");
        request
    }

    async fn wanted(&self, what: &WorkerProvided) -> Result<ArtifactId, String> {
        within("the import", self.worker.imports.wanted(what)).await
    }

    async fn end(self) {
        self.worker.stopping.cancel();
        self.worker.tasks.close();
        within("the end", self.worker.tasks.wait()).await;
        self.store.end().await;
    }
}

fn yours(artifact: ArtifactId, volume: VolumeHandle) -> pb::PrepareImportResponse {
    pb::PrepareImportResponse {
        artifact_id: artifact.to_string(),
        volume_handle: volume.to_string(),
        term: Some(rpc::duration(Duration::from_secs(60))),
    }
}

fn imported(artifact: ArtifactId) -> pb::PrepareImportResponse {
    pb::PrepareImportResponse { term: None, ..yours(artifact, VolumeHandle::new()) }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_thing_is_copied_read_back_and_completed_one_after_the_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut brought = conformance::worker_provided(directory.path());
    brought.truncate(2);
    let mut suite = Suite::start(brought.clone()).await;
    for WorkerProvidedPath { what, version, path } in brought {
        let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
        let asked = suite.begin(artifact, volume).await;
        assert_eq!(asked.session_credential, "credential");
        let resource_type = match &what {
            WorkerProvided::ResourceType(name) => name.clone(),
            WorkerProvided::Certs => String::new(),
        };
        assert_eq!(asked.provided, Some(pb::WorkerProvided { resource_type, version, path }));
        let complete = suite.complete(artifact).await;
        let held = suite
            .worker
            .transfers
            .manifests
            .scan(&*suite.worker.runtime, volume, "main")
            .await
            .expect("it is there");
        assert_eq!((complete.volume_handle, complete.size_bytes), (volume.to_string(), 8));
        assert_eq!(complete.digest, held.tree_digest().as_bytes()[..]);
        assert_eq!(suite.wanted(&what).await, Ok(artifact));
        let copy = std::fs::read_to_string(suite.machine.path(volume).join("provided"));
        assert_eq!(copy.expect("a copy"), "original");
        let notes = || async { suite.worker.runtime.notes(volume).await.expect("it is there").artifact };
        within("the note", async {
            while notes().await != Some(artifact) {
                tokio::task::yield_now().await
            }
        })
        .await;
    }
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_imported_is_not_copied_again_whoever_asks() {
    let directory = tempfile::tempdir().expect("a directory");
    let what = git(directory.path()).what;
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let first = ArtifactId::new();
    let (_, answer) = suite.prepare().await;
    assert_eq!(suite.worker.imports.known(&what), None);
    answer.send(Ok(imported(first))).expect("it waits");
    assert_eq!(suite.wanted(&what).await, Ok(first));

    // A gateway that is let in again asks again.
    let next = OpenSession { credential: "next".to_owned(), session: Session(2), ..suite.session.clone() };
    suite.worker.session.set(Some(next));
    let (asked, answer) = suite.prepare().await;
    assert_eq!(asked.session_credential, "next");
    let second = ArtifactId::new();
    answer.send(Ok(imported(second))).expect("it waits");
    let known = || suite.worker.imports.known(&what) == Some(second);
    within("the answer", async {
        while !known() {
            tokio::task::yield_now().await
        }
    })
    .await;

    // And one that hears that it is gone.
    assert!(!suite.worker.imports.lost(first), "that is another");
    assert!(suite.worker.imports.lost(second));
    assert_eq!(suite.worker.imports.known(&what), None);
    let third = ArtifactId::new();
    let (_, answer) = suite.prepare().await;
    answer.send(Ok(imported(third))).expect("it waits");
    assert_eq!(suite.wanted(&what).await, Ok(third));
    assert_eq!(suite.worker.runtime.list().await.expect("list").volumes, []);
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_fails_is_told_tried_again_and_holds_up_nothing_else() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut brought = conformance::worker_provided(directory.path());
    brought.swap(0, 2);
    let (missing, certs) = (brought[0].clone(), brought[1].what.clone());
    brought.truncate(2);
    let mut suite = Suite::start(brought).await;
    let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
    suite.begin(artifact, volume).await;
    let told = suite.fail().await;
    assert_eq!(told.volume_handle, volume.to_string());
    assert!(!told.why.is_empty());
    let of_certs = ArtifactId::new();
    let (asked, answer) = suite.prepare().await;
    assert_eq!(asked.provided.expect("something").resource_type, "");
    answer.send(Ok(imported(of_certs))).expect("it waits");
    assert_eq!(suite.wanted(&certs).await, Ok(of_certs));

    // By itself after a pause, and each who wants it hears of a try of his own.
    suite.begin(artifact, VolumeHandle::new()).await;
    suite.fail().await;
    let worker = suite.worker.clone();
    let again = async {
        loop {
            suite.begin(artifact, VolumeHandle::new()).await;
            suite.fail().await;
        }
    };
    let wanted = tokio::select! {
        wanted = worker.imports.wanted(&missing.what) => wanted,
        () = within("the failure", again) => panic!("it has no end"),
    };
    assert!(wanted.expect_err("it is not there").contains("copy a volume"));

    std::fs::create_dir_all(&missing.path).expect("make");
    let again = async {
        suite.begin(artifact, VolumeHandle::new()).await;
        suite.complete(artifact).await;
    };
    let both = async { tokio::join!(worker.imports.wanted(&missing.what), again) };
    let (wanted, ()) = within("another try", both).await;
    assert_eq!(wanted, Ok(artifact));
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_wants_something_waits_while_the_store_cannot_say() {
    let directory = tempfile::tempdir().expect("a directory");
    let what = git(directory.path()).what;
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let worker = suite.worker.clone();
    let artifact = ArtifactId::new();
    let script = async {
        for reason in [Reason::Unavailable, Reason::StaleSession] {
            let (_, answer) = suite.prepare().await;
            answer.send(Err(reason.status("gantry.test", "as the test asked for"))).expect("it waits");
        }
        // Its claim ran out while it was copied.
        suite.begin(artifact, VolumeHandle::new()).await;
        let Asked::CompleteImport(_, answer) = suite.store.asked().await else { panic!("no end") };
        answer.send(Err(Reason::ClaimLost.status("gantry.test", "too late"))).expect("it waits");
        suite.begin(artifact, VolumeHandle::new()).await;
        suite.complete(artifact).await;
    };
    let both = async { tokio::join!(worker.imports.wanted(&what), script) };
    let (wanted, ()) = within("the import", both).await;
    assert_eq!(wanted, Ok(artifact));
    suite.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_import_renews_its_claim() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut suite = Suite::start(vec![git(directory.path())]).await;
    let held = suite.machine.faults.hold_volumes();
    let (artifact, volume) = (ArtifactId::new(), VolumeHandle::new());
    let short = pb::PrepareImportResponse {
        term: Some(rpc::duration(Duration::from_millis(30))),
        ..yours(artifact, volume)
    };
    let (first, answer) = suite.prepare().await;
    answer.send(Ok(short.clone())).expect("it waits");
    for _ in 0..3 {
        let (again, answer) = suite.prepare().await;
        assert_eq!(again, first);
        answer.send(Ok(short.clone())).expect("it waits");
    }
    drop(held);
    loop {
        match suite.store.asked().await {
            Asked::PrepareImport(_, answer) => _ = answer.send(Ok(short.clone())),
            Asked::CompleteImport(request, answer) => {
                assert_eq!(request.volume_handle, volume.to_string());
                let complete = pb::CompleteImportResponse { artifact_id: artifact.to_string() };
                answer.send(Ok(complete)).expect("it waits");
                break;
            }
            _ => panic!("it asks for something else"),
        }
    }
    suite.end().await;
}
