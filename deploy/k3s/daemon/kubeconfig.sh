#!/bin/sh
# kubeconfig.sh: prints the kubeconfig of a ringfenced that runs outside the cluster: the account `ringfenced`, and its rights alone.
# Needs account.yaml applied, and kubectl as an administrator. Its token lasts until this takes it back:
#   kubectl -n ringfence delete secret ringfenced
set -eu
kubectl apply --server-side -f - >/dev/null <<S
apiVersion: v1
kind: Secret
metadata:
  name: ringfenced
  namespace: ringfence
  annotations: {kubernetes.io/service-account.name: ringfenced}
type: kubernetes.io/service-account-token
S
token=
for _ in 1 2 3 4 5 6 7 8 9 10; do
	token=$(kubectl -n ringfence get secret ringfenced -o 'jsonpath={.data.token}')
	[ -z "$token" ] || break
	sleep 1
done
[ -n "$token" ] || { echo "kubeconfig.sh: the cluster gave the account no token" >&2; exit 1; }
authority=$(kubectl -n ringfence get secret ringfenced -o 'jsonpath={.data.ca\.crt}')
server=$(kubectl config view --minify -o 'jsonpath={.clusters[0].cluster.server}')
cat <<K
apiVersion: v1
kind: Config
clusters:
  - name: cluster
    cluster: {server: "$server", certificate-authority-data: $authority}
users:
  - name: ringfenced
    user: {token: $(echo "$token" | base64 -d)}
contexts:
  - name: ringfenced
    context: {cluster: cluster, user: ringfenced}
current-context: ringfenced
K
