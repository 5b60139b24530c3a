//! Several futures at a time, on one core.

use std::future::Future;

use futures_util::{StreamExt, stream};

/// Runs `work` on every item, at most `bound` at a time, the next one as soon as any has ended. Dropping it drops what is
/// running.
pub async fn for_each_bounded<I, F>(items: Vec<I>, bound: usize, work: impl FnMut(I) -> F)
where
    F: Future<Output = ()>,
{
    stream::iter(items).for_each_concurrent(bound, work).await;
}

/// Runs `work` on every item, at most `bound` at a time, and returns the answers in the order of the items. Dropping it
/// drops what is running.
pub async fn map_bounded<I, F>(items: Vec<I>, bound: usize, work: impl FnMut(I) -> F) -> Vec<F::Output>
where
    F: Future,
{
    stream::iter(items).map(work).buffered(bound).collect().await
}
