//! Purges, as administrators ask for them over HTTP.

use super::Services;
use super::action_cache::mangled;
use super::refusal::Refusal;
use crate::limits::PURGE_PROGRESS;
use crate::pure::http_cache::{Space, Target};
use crate::pure::purge::Which;
use crate::pure::scope::Scope;
use crate::rt::time::{self, Either};
use crate::store::{Purge, Purged, Store};

/// Purges what a path of the HTTP cache names, of whom `scope` says.
pub async fn purge_target<S: Store>(services: &Services<S>, scope: &Scope, target: &Target) -> Result<Purged, Refusal> {
    let store = services.store.scoped(scope);
    if target.space == Space::Cas {
        return Ok(store.purge(Purge::Blob(target.hash)).await?);
    }
    let hash = mangled(services, &target.instance, target.hash);
    let mut purged = store.purge(Purge::Action(hash)).await?;
    if !services.options.check_http_actions && *scope == Scope::default() {
        // What HTTP clients have stored under this name stands elsewhere.
        let raw = services.store.scoped(&Scope::raw()).purge(Purge::Action(hash)).await?;
        purged.examined += raw.examined;
        purged.purged += raw.purged;
    }
    Ok(purged)
}

/// Purges the action results that the query of a request names.
pub async fn purge_actions<S: Store>(services: &Services<S>, query: &str) -> Result<Purged, Refusal> {
    let which = Which::parse_query(query, time::unix_seconds());
    let which = which.map_err(|error| Refusal::new(400, error.to_string()))?;
    Ok(services.store.purge(Purge::Actions(which)).await?)
}

/// Waits for a purge; says from time to time that it goes on, in the log and by `goes_on`, and how it ended.
pub async fn told<'a>(
    what: &str,
    purge: impl Future<Output = Result<Purged, Refusal>> + 'a,
    goes_on: impl Fn(),
) -> Result<Purged, Refusal> {
    tracing::info!("purge of {what}: begins");
    let mut purge = Box::pin(purge);
    loop {
        match time::race(&mut purge, time::sleep(PURGE_PROGRESS)).await {
            Either::Right(()) => {
                tracing::info!("purge of {what}: goes on");
                goes_on();
            }
            Either::Left(Ok(ended)) => {
                let Purged { examined, purged } = ended;
                tracing::info!(examined, purged, "purge of {what}: done");
                return Ok(ended);
            }
            Either::Left(Err(refusal)) if refusal.code == 400 => {
                tracing::info!("purge of {what}: nothing is purged: {}", refusal.text);
                return Err(refusal);
            }
            Either::Left(Err(refusal)) => {
                tracing::error!("purge of {what}: failed, so what it was to take may come back: {}", refusal.text);
                return Err(refusal);
            }
        }
    }
}
