//! Pages of lists: sizes, and tokens that nobody else can read meaning into.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tonic::Status;
use uuid::Uuid;

use crate::{Reason, invalid_field};

/// One page of a list that is ordered by an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// How many items at most.
    pub size: u64,
    /// The last id of the page before. `None`: the first page.
    pub after: Option<Uuid>,
}

/// Parses `page_size` (0: 100) and `page_token`.
pub fn parse(service: &str, size: u32, token: &str) -> Result<Page, Status> {
    let size = match size {
        0 => 100,
        1..=1000 => u64::from(size),
        _ => return Err(invalid_field("page_size", "must be at most 1000")),
    };
    if token.is_empty() {
        return Ok(Page { size, after: None });
    }
    let after = URL_SAFE_NO_PAD.decode(token).ok().and_then(|bytes| Uuid::from_slice(&bytes).ok());
    match after {
        Some(after) => Ok(Page { size, after: Some(after) }),
        None => Err(Reason::InvalidPageToken.status(service, "the page token was not made by this call")),
    }
}

/// The token of the page that follows one that ends with `last`.
#[must_use]
pub fn token(last: Uuid) -> String {
    URL_SAFE_NO_PAD.encode(last.as_bytes())
}
