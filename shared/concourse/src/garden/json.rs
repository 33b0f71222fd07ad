//! A stream of consecutive JSON values on a connection, independent of its segments.

use std::io;

use bytes::BytesMut;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Limit of one value, in bytes. Servers send smaller messages.
const MOST: usize = 1 << 20;

/// The reason why there is no next value.
#[derive(Debug, thiserror::Error)]
pub(super) enum NextError {
    /// The connection ended between two values, or inside one: a peer can stop anywhere.
    #[error("the connection ended")]
    Ended,
    #[error("the connection broke")]
    Broken(#[source] io::Error),
    #[error("invalid message: {0}")]
    Malformed(String),
}

/// Bytes that were read and not yet parsed.
#[derive(Debug)]
pub(super) struct Values {
    buffer: BytesMut,
}

impl Values {
    /// Starts with the bytes that were read after the head of the response.
    pub(super) fn new(beyond: BytesMut) -> Self {
        Self { buffer: beyond }
    }

    /// Returns the next value.
    ///
    /// Cancel safe: unparsed bytes stay in the buffer.
    pub(super) async fn next<T: DeserializeOwned>(
        &mut self,
        from: &mut (impl AsyncRead + Unpin),
    ) -> Result<T, NextError> {
        loop {
            if let Some(value) = self.take()? {
                return Ok(value);
            }
            if self.buffer.len() >= MOST {
                return Err(NextError::Malformed(format!("longer than {MOST} bytes")));
            }
            match from.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(NextError::Ended),
                Ok(_) => {}
                Err(error) => return Err(NextError::Broken(error)),
            }
        }
    }

    /// Returns a complete value from the buffer, if there is one.
    fn take<T: DeserializeOwned>(&mut self) -> Result<Option<T>, NextError> {
        let mut values = serde_json::Deserializer::from_slice(&self.buffer).into_iter::<T>();
        let (value, taken) = match values.next() {
            None => (None, self.buffer.len()),
            Some(Ok(value)) => (Some(value), values.byte_offset()),
            Some(Err(error)) if error.is_eof() => (None, 0),
            Some(Err(error)) => return Err(NextError::Malformed(error.to_string())),
        };
        let _ = self.buffer.split_to(taken);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const TEXT: &[u8] =
        b"{\"process_id\":\"p\\u00e9\xc3\xa9\",\"stream_id\":\"1\"}{\"exit_status\":0} \n\t{}";

    #[tokio::test]
    async fn values_parse_across_segment_boundaries() {
        let expected = vec![
            json!({"process_id": "p\u{e9}\u{e9}", "stream_id": "1"}),
            json!({"exit_status": 0}),
            json!({}),
        ];
        for beyond in 0..=TEXT.len() {
            for cut in beyond..=TEXT.len() {
                let mut values = Values::new(TEXT[..beyond].into());
                let mut from = TEXT[beyond..cut].chain(&TEXT[cut..]);
                let mut seen = Vec::<Value>::new();
                let end = loop {
                    match values.next(&mut from).await {
                        Ok(value) => seen.push(value),
                        Err(error) => break error,
                    }
                };
                assert_eq!(seen, expected, "{beyond} {cut}");
                assert!(matches!(end, NextError::Ended), "{end:?}");
            }
        }
    }

    #[tokio::test]
    async fn truncated_value_is_end_and_garbage_malformed() {
        let mut half = &b"{\"exit_sta"[..];
        assert!(matches!(Values::new(BytesMut::new()).next::<Value>(&mut half).await, Err(NextError::Ended)));
        let mut rubbish = &b"1f\r\n{}"[..];
        let mut values = Values::new(BytesMut::new());
        #[derive(Debug, serde::Deserialize)]
        struct Object {}
        let Object {} = match values.next::<Object>(&mut rubbish).await {
            Err(NextError::Malformed(_)) => return,
            other => other.expect("rubbish was taken for an end"),
        };
        panic!("rubbish was taken for a message");
    }

    #[tokio::test]
    async fn overlong_message_is_rejected() {
        let mut endless = b"\"".chain(tokio::io::repeat(b'a'));
        let error = Values::new(BytesMut::new()).next::<Value>(&mut endless).await.unwrap_err();
        assert!(matches!(error, NextError::Malformed(_)), "{error:?}");
    }
}
