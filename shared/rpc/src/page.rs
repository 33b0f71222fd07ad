//! Pages of lists, with opaque page tokens.
//!
//! Handlers of list calls parse the request with [`Page::of`] and build the response with
//! [`Page::end`]. A token contains the id of the last item of the previous page and a digest of the
//! call and its request. A token is therefore valid only for the same call with the same fields.
//! Only the page size may change.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use prost::Message;
use tonic::Status;
use uuid::Uuid;

use crate::{Reason, invalid_field, pb};

/// Maximum size of the items of a page in bytes, unless the page has a single item. Clients decode
/// at most 4 MiB by default.
pub const MAX_BYTES: usize = 2 << 20;

/// Size of the digest in a token, in bytes.
const CHECK: usize = 8;

/// Request of a list call.
pub trait List: Message + Clone {
    /// Name of the call.
    const CALL: &'static str;

    /// Page size and page token. All other fields select the items.
    fn page(&mut self) -> (&mut u32, &mut String);
}

macro_rules! lists {
    ($($package:ident::$request:ident,)+) => {$(
        impl List for pb::$package::$request {
            const CALL: &'static str = concat!(stringify!($package), ".", stringify!($request));

            fn page(&mut self) -> (&mut u32, &mut String) {
                (&mut self.page_size, &mut self.page_token)
            }
        }
    )+};
}

lists! {
    artifacts::ListArtifactsRequest,
    artifacts::ListAtRiskRequest,
    artifacts::ListBaseResourceTypesRequest,
    artifacts::ListContainersRequest,
    artifacts::ListImportsRequest,
    artifacts::ListPinsRequest,
    artifacts::ListResourceCachesRequest,
    artifacts::ListResourceCertsRequest,
    artifacts::ListOrphansRequest,
    artifacts::ListTaskCachesRequest,
    artifacts::ListVolumesRequest,
    runtime::ListContainersRequest,
    scheduler::ListLeasesRequest,
    scheduler::ListRequest,
    scheduler::ListWorkersRequest,
}

/// Page of a list that is ordered by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// Maximum number of items.
    pub size: u64,
    /// Last id of the previous page. `None`: this is the first page.
    pub after: Option<Uuid>,
    /// Digest of the call and the request without the page fields.
    query: [u8; 32],
}

impl Page {
    /// Parses the page of `request`: up to `page_size` items (0: 100) after the item in
    /// `page_token`.
    pub fn of<R: List>(service: &str, request: &R) -> Result<Self, Status> {
        let mut query = request.clone();
        let (size, token) = query.page();
        let (size, token) = (std::mem::take(size), std::mem::take(token));
        let size = match size {
            0 => 100,
            1..=1000 => u64::from(size),
            _ => return Err(invalid_field("page_size", "must be at most 1000")),
        };
        let query = blake3::Hasher::new_derive_key(R::CALL).update(&query.encode_to_vec()).finalize().into();
        let first = Self { size, after: None, query };
        if token.is_empty() {
            return Ok(first);
        }
        match first.read(&token) {
            Some(after) => Ok(Self { after: Some(after), ..first }),
            None => {
                let message = "cannot use page token: it comes from another call or request; list from the start without a token";
                Err(Reason::InvalidPageToken.status(service, message))
            }
        }
    }

    /// Returns as many of the items as fit the page, and the token of the next page. `more`: the
    /// list continues after `found`. The token is empty for the last page.
    pub fn end<T: Message>(
        &self,
        found: impl IntoIterator<Item = (Uuid, T)>,
        mut more: bool,
    ) -> (Vec<T>, String) {
        let (mut items, mut last, mut bytes) = (Vec::new(), None, 0);
        for (id, item) in found {
            bytes += item.encoded_len();
            if bytes > MAX_BYTES && last.is_some() {
                more = true;
                break;
            }
            items.push(item);
            last = Some(id);
        }
        (items, last.filter(|_| more).map(|last| self.token(last)).unwrap_or_default())
    }

    /// Returns the token of the page after the item `last`.
    #[must_use]
    pub fn token(&self, last: Uuid) -> String {
        URL_SAFE_NO_PAD.encode([last.as_bytes(), &self.check(last)[..]].concat())
    }

    /// Returns the id in a token. `None`: the token is not valid for this request.
    fn read(&self, token: &str) -> Option<Uuid> {
        let bytes = URL_SAFE_NO_PAD.decode(token).ok()?;
        let (last, check) = bytes.split_first_chunk()?;
        let last = Uuid::from_bytes(*last);
        (check == self.check(last)).then_some(last)
    }

    /// Returns the digest in the token for `last`.
    fn check(&self, last: Uuid) -> [u8; CHECK] {
        let digest = blake3::keyed_hash(&self.query, last.as_bytes());
        std::array::from_fn(|index| digest.as_bytes()[index])
    }
}

#[cfg(test)]
mod tests {
    use pb::artifacts::{InventoryState, ListContainersRequest, ListVolumesRequest};
    use tonic_types::StatusExt;

    use super::*;

    fn volumes(worker: &str, state: InventoryState, page_size: u32, page_token: &str) -> ListVolumesRequest {
        ListVolumesRequest {
            worker_id: worker.to_owned(),
            state: state.into(),
            page_size,
            page_token: page_token.to_owned(),
            ..ListVolumesRequest::default()
        }
    }

    #[track_caller]
    fn assert_foreign<R: List>(request: &R) {
        let refused = Page::of("test", request).expect_err("a foreign token");
        let reason = refused.get_details_error_info().expect("a reason").reason;
        assert_eq!(reason, Reason::InvalidPageToken.as_str());
    }

    #[test]
    fn token_is_valid_only_for_its_request() {
        let (last, any) = (Uuid::now_v7(), InventoryState::Unspecified);
        let first = Page::of("test", &volumes("w", any, 0, "")).expect("a page");
        assert_eq!((first.size, first.after), (100, None));
        let token = first.token(last);
        assert_eq!(token.len(), 32, "{token}");

        // Another page size.
        let next = Page::of("test", &volumes("w", any, 7, &token)).expect("the next page");
        assert_eq!((next.size, next.after), (7, Some(last)));
        assert_eq!(next.token(last), token);

        assert_foreign(&volumes("v", any, 0, &token));
        assert_foreign(&volumes("w", InventoryState::Created, 0, &token));
        let containers = ListContainersRequest {
            worker_id: "w".to_owned(),
            page_token: token.clone(),
            ..ListContainersRequest::default()
        };
        assert_foreign(&containers);
    }

    #[test]
    fn forged_token_is_rejected() {
        let any = InventoryState::Unspecified;
        let token = Page::of("test", &volumes("w", any, 0, "")).expect("a page").token(Uuid::now_v7());
        let bytes = URL_SAFE_NO_PAD.decode(&token).expect("base64");
        for index in 0..bytes.len() {
            let mut other = bytes.clone();
            other[index] ^= 1;
            assert_foreign(&volumes("w", any, 0, &URL_SAFE_NO_PAD.encode(other)));
        }
        for length in 1..bytes.len() {
            assert_foreign(&volumes("w", any, 0, &URL_SAFE_NO_PAD.encode(&bytes[..length])));
        }
        let forged = URL_SAFE_NO_PAD.encode(Uuid::now_v7().as_bytes());
        for foreign in ["?", &forged, &format!("{token}AAAA"), &"A".repeat(100_000)] {
            assert_foreign(&volumes("w", any, 0, foreign));
        }
    }

    #[test]
    fn page_ends_when_its_items_are_large() {
        let page = Page::of("test", &volumes("w", InventoryState::Unspecified, 0, "")).expect("a page");
        let item = |bytes: usize| (Uuid::now_v7(), "x".repeat(bytes));
        let sizes = |(items, token): (Vec<String>, String)| {
            (items.iter().map(String::len).collect::<Vec<_>>(), page.read(&token))
        };

        let small = [item(1), item(2)];
        assert_eq!(sizes(page.end(small.clone(), false)), (vec![1, 2], None));
        assert_eq!(sizes(page.end(small.clone(), true)), (vec![1, 2], Some(small[1].0)));

        let large = [item(MAX_BYTES - 1000), item(500), item(1000), item(1)];
        let page_of_two = (vec![MAX_BYTES - 1000, 500], Some(large[1].0));
        assert_eq!(sizes(page.end(large, false)), page_of_two);
        let larger = [item(MAX_BYTES + 1), item(1)];
        assert_eq!(sizes(page.end(larger.clone(), false)), (vec![MAX_BYTES + 1], Some(larger[0].0)));
        assert_eq!(sizes(page.end([item(MAX_BYTES + 1)], false)), (vec![MAX_BYTES + 1], None));
        assert_eq!(sizes(page.end([], true)), (vec![], None));
    }

    #[test]
    fn page_size_above_1000_is_rejected() {
        let any = InventoryState::Unspecified;
        assert_eq!(Page::of("test", &volumes("w", any, 1000, "")).map(|page| page.size).ok(), Some(1000));
        for size in [1001, u32::MAX] {
            let refused = Page::of("test", &volumes("w", any, size, "")).expect_err("too many");
            let violations = refused.get_details_bad_request().expect("a field").field_violations;
            assert_eq!(violations[0].field, "page_size");
        }
    }
}
