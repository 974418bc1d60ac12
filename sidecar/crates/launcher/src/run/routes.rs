//! Text about the addresses at which the sidecars of a job are reached. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::placement::Placement;
use super::state::State;

/// Returns a line for each sidecar whose host has several addresses: those at which others reach it, and unused ones. With
/// `all`, returns a line for every sidecar.
pub(super) fn chosen(placement: &Placement, state: &State, all: bool) -> Vec<String> {
    let sidecars = (0_u32..).zip(&placement.sidecars);
    let choices = sidecars.filter(|(_, place)| all || state.hosts[place.host].addresses.len() > 1);
    choices.filter_map(|(sidecar, place)| line(placement, state, sidecar, place.host)).collect()
}

/// The addresses of a sidecar's control port, with their interfaces.
pub(super) fn addresses_of(placement: &Placement, state: &State, sidecar: u32) -> String {
    let Some(place) = placement.sidecars.get(sidecar as usize) else { return "no address".to_owned() };
    let port = state.sidecars[sidecar as usize].bound.as_ref().map_or(0, |bound| bound.control.port());
    let addresses = state.hosts[place.host].addresses.iter();
    let texts: Vec<String> =
        addresses.map(|at| format!("{} ({})", SocketAddr::new(at.address, port), at.interface)).collect();
    texts.join(", ")
}

fn line(placement: &Placement, state: &State, sidecar: u32, host: usize) -> Option<String> {
    let reached: BTreeSet<IpAddr> =
        state.sidecars.iter().filter_map(|other| other.linked.get(&sidecar).copied()).collect();
    if reached.is_empty() {
        return None;
    }
    let own = &state.hosts[host].addresses;
    let at: Vec<String> = reached
        .iter()
        .map(|address| match own.iter().find(|own| own.address == *address) {
            Some(own) => format!("{address} over {}", own.interface),
            None => format!("{address}, which is not its own"),
        })
        .collect();
    let others = own.iter().filter(|own| !reached.contains(&own.address));
    let others: Vec<String> = others.map(ToString::to_string).collect();
    let others = if others.is_empty() { String::new() } else { format!("; not used: {}", others.join(", ")) };
    Some(format!("sidecar {sidecar} ({}) at {}{others}", placement.hosts[host].name, at.join(" and ")))
}
